"""What a pickle may call: which functions and classes are known to make data, which to do harm. docs/scan.md has the rule.

Nothing here depends on the machine: what is installed, which Python runs, and what could be imported do not count.
"""

from __future__ import annotations

import re
from functools import lru_cache

from ckpt_tools.pickling.torch_objects import LOAD_FROM_BYTES
from ckpt_tools.pickling.weights_only import ALLOWED, ALLOWED_NESTED, is_newer_dtype
from ckpt_tools.tree.nodes import Global


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _named(text: str) -> frozenset[Global]:
    """Globals from a text of `module:name,name` blocks."""
    blocks = (block.partition(":") for block in text.split())
    return frozenset(Global(module, name) for module, _, names in blocks for name in names.split(","))


# Enumerations: a member is pickled as a call of its class with a value, which finds it.
_ENUMERATIONS = _named(
    "http:HTTPStatus,HTTPMethod re:RegexFlag uuid:SafeUUID inspect:_ParameterKind "
    "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING "
    "torch.distributed._shard.sharded_tensor.metadata:MEM_FORMAT_ENCODING "
    "megatron.core.transformer.enums:AttnMaskType,AttnType,AttnBackend,LayerType,ModelType "
    "torch.distributed.checkpoint.planner:WriteItemType,LoadItemType "
    "deepspeed.runtime.zero.config:ZeroStageEnum deepspeed.runtime.zero.offload_config:OffloadDeviceEnum "
    "megatron.core.enums:ModelType,Fp8Recipe peft.utils.peft_types:PeftType,TaskType "
    "torch.distributed.fsdp.api:StateDictType,ShardingStrategy,BackwardPrefetch "
    "transformers.trainer_utils:IntervalStrategy,SchedulerType,HubStrategy,SaveStrategy,EvaluationStrategy,FSDPOption "
    "transformers.training_args:OptimizerNames,ParallelMode transformers.utils.generic:ExplicitEnum "
    "transformers.debug_utils:DebugOption accelerate.utils.dataclasses:DistributedType,PrecisionType,DynamoBackend,"
    "ComputeEnvironment,SageMakerDistributedType,RNGType,LoggerType "
    "pytorch_lightning.utilities.enums:GradClipAlgorithmType,AMPType,DistributedType,DeviceType,PrecisionType "
    "lightning.pytorch.utilities.enums:GradClipAlgorithmType "
    "torchao.quantization.quantize_.common.kernel_preference:KernelPreference "
    "torchao.quantization.quant_primitives:MappingType,ZeroPointDomain,TorchAODType "
)  # fmt: skip
# They keep what they are given, and do nothing before they are raised.
_EXCEPTIONS = _named(
    "builtins:BaseException,BaseExceptionGroup,Exception,ExceptionGroup,GeneratorExit,KeyboardInterrupt,StopAsyncIteration,"
    "StopIteration,SystemExit,ArithmeticError,AssertionError,AttributeError,BlockingIOError,BrokenPipeError,BufferError,"
    "ChildProcessError,ConnectionAbortedError,ConnectionError,ConnectionRefusedError,ConnectionResetError,EOFError,"
    "EnvironmentError,FileExistsError,FileNotFoundError,FloatingPointError,IOError,ImportError,IndentationError,IndexError,"
    "InterruptedError,IsADirectoryError,KeyError,LookupError,MemoryError,ModuleNotFoundError,NameError,NotADirectoryError,"
    "NotImplementedError,OSError,OverflowError,PermissionError,ProcessLookupError,RecursionError,ReferenceError,RuntimeError,"
    "SyntaxError,SystemError,TabError,TimeoutError,TypeError,UnboundLocalError,UnicodeDecodeError,UnicodeEncodeError,"
    "UnicodeError,UnicodeTranslateError,ValueError,ZeroDivisionError,Warning,BytesWarning,DeprecationWarning,EncodingWarning,"
    "FutureWarning,ImportWarning,PendingDeprecationWarning,ResourceWarning,RuntimeWarning,SyntaxWarning,UnicodeWarning,"
    "UserWarning"
)

# Functions and classes that make data, whatever they are given: they call none of their arguments.
_DATA = ALLOWED | ALLOWED_NESTED | _ENUMERATIONS | _EXCEPTIONS | _named(
    "argparse:Namespace types:SimpleNamespace array:array,_array_reconstructor random:Random itertools:count "
    "builtins:list,dict,tuple,set,frozenset,int,float,str,bytes,bytearray,complex,bool,range,slice,object "
    "collections:defaultdict,deque,ChainMap,UserDict,UserList copyreg:_reconstructor,__newobj__,__newobj_ex__ "
    "functools:partial datetime:date,time,datetime,timedelta,timezone decimal:Decimal fractions:Fraction uuid:UUID "
    "time:struct_time "
    "pathlib:Path,PosixPath,WindowsPath,PurePath,PurePosixPath,PureWindowsPath "
    "pathlib._local:Path,PosixPath,WindowsPath,PurePath,PurePosixPath,PureWindowsPath "
    "typing:_GenericAlias,_UnionGenericAlias,_SpecialForm,_LiteralGenericAlias types:GenericAlias "
    "dataclasses:Field,_MISSING_TYPE inspect:Signature,Parameter,_empty string:Template contextlib:nullcontext "
    "ipaddress:IPv4Address,IPv6Address,IPv4Network,IPv6Network,IPv4Interface,IPv6Interface "
    "re:_compile logging:getLogger,Logger zoneinfo:ZoneInfo._unpickle pytz:_UTC,_p dateutil.tz.tz:tzutc "
    "numpy:dtype,ndarray,bool_,bool,float16,float32,float64,int8,int16,int32,int64,uint8,uint16,uint32,uint64,str_,bytes_,"
    "complex64,complex128,datetime64,timedelta64,longlong,ulonglong,intc,uintc,record,recarray numpy.rec:recarray "
    "numpy.core.multiarray:_reconstruct,scalar numpy._core.multiarray:_reconstruct,scalar "
    "numpy.core.numeric:_frombuffer numpy._core.numeric:_frombuffer numpy.ma.core:_mareconstruct,MaskedArray "
    "numpy.random._pickle:__randomstate_ctor,__generator_ctor,__bit_generator_ctor numpy.random._mt19937:MT19937 "
    "numpy.random.bit_generator:SeedSequence,__pyx_unpickle_SeedSequence numpy.random._pcg64:PCG64,PCG64DXSM "
    "numpy.random._philox:Philox numpy.random._sfc64:SFC64 "
    "torch.storage:_load_from_bytes,UntypedStorage,TypedStorage torch._utils:_rebuild_sparse_csr_tensor,_rebuild_xla_tensor "
    "torch.tensor:_rebuild_from_type_v2 torch.nn.parameter:Buffer,UninitializedParameter,UninitializedBuffer "
    "torch.autograd.variable:Variable "
    "torch.jit._pickle:build_intlist,build_floatlist,build_doublelist,build_boollist,build_tensorlist,"
    "build_tensor_from_id,restore_type_tag torch._C:_TensorBase,TensorBase,Generator "
)  # fmt: skip
# Classes of compiled code that make an instance out of sizes, numbers and arrays, and do nothing else.
CONSTRUCTED = _named(
    "sklearn.tree._tree:Tree sklearn.linear_model._sgd_fast:Hinge,SquaredHinge,ModifiedHuber,Log,SquaredLoss,Huber,"
    "EpsilonInsensitive,SquaredEpsilonInsensitive sklearn._loss._loss:CyHalfSquaredError,CyAbsoluteError,CyPinballLoss,"
    "CyHuberLoss,CyHalfPoissonLoss,CyHalfGammaLoss,CyHalfTweedieLoss,CyHalfTweedieLossIdentity,CyHalfBinomialLoss,"
    "CyHalfMultinomialLoss,CyExponentialLoss torch.nn.backends.thnn:_get_thnn_function_backend"  # of modules up to PyTorch 1.1
)
_MOST_DOTS = 16  # of a name that are looked at
_NUMPY_DTYPE = re.compile(r"\w+DType")

# These call, or make an instance of, what stands at a place of their arguments.
HANDED: dict[Global, tuple[str, ...]] = {
    name: how
    for names, how in (
        (
            "torch._utils:_rebuild_wrapper_subclass numpy.core.multiarray:_reconstruct numpy._core.multiarray:_reconstruct "
            "numpy.random.bit_generator:__pyx_unpickle_SeedSequence copyreg:__newobj__,__newobj_ex__ "
            "sklearn.neighbors._kd_tree:newObj sklearn.neighbors._ball_tree:newObj sklearn.metrics._dist_metrics:newObj "
            "pandas.core.indexes.base:_new_Index pandas.core.indexes.datetimes:_new_DatetimeIndex "
            "pandas.core.indexes.period:_new_PeriodIndex pandas._libs.arrays:__pyx_unpickle_NDArrayBacked",
            ("new",),
        ),
        ("torch._tensor:_rebuild_from_type_v2 torch.tensor:_rebuild_from_type_v2", ("apply", "new")),
        ("numpy.random._pickle:__randomstate_ctor,__generator_ctor,__bit_generator_ctor", ("name", "call")),
        ("copyreg:_reconstructor", ("new", "call")),
        ("numpy.ma.core:_mareconstruct", ("new", "new")),
    )
    for name in _named(names)
}
RECONSTRUCTOR = Global("copyreg", "_reconstructor")
ENCODE = Global("_codecs", "encode")
TEXT_CODECS = frozenset(("latin1", "latin-1", "utf-8", "utf8", "ascii"))
ITER = Global("builtins", "iter")  # of one argument harmless, of two it calls the first
TYPE = Global("builtins", "type")  # of a constant: the class of None
CONSTANTS = frozenset(Global("builtins", name) for name in ("Ellipsis", "NotImplemented"))
ZONE, ZONE_MAKER = Global("zoneinfo", "ZoneInfo"), "_unpickle"  # reads the rules of a time zone by its name
REDUCE = frozenset((Global("functools", "reduce"), Global("_functools", "reduce")))
OR = frozenset((Global("operator", "or_"), Global("_operator", "or_")))
GETATTR = Global("builtins", "getattr")
GETITEM = frozenset((Global("_operator", "getitem"), Global("operator", "getitem")))
PARTIAL, ITEMGETTER = Global("functools", "partial"), Global("operator", "itemgetter")
# What calls of these give is no copy: it belongs to the program, which a state set on it changes.
SHARED = _ENUMERATIONS | _named(
    "builtins:getattr,type operator:getitem _operator:getitem logging:getLogger pytz:_UTC,_p "
    "zoneinfo:ZoneInfo._unpickle typing:_GenericAlias,_UnionGenericAlias,_SpecialForm,_LiteralGenericAlias types:GenericAlias "
    "torch.nn.backends.thnn:_get_thnn_function_backend "
    # these give what they are given
    "torch.jit._pickle:build_intlist,build_floatlist,build_doublelist,build_boollist,build_tensorlist,restore_type_tag"
)

# Modules of which every function does harm in the hands of a stranger: it runs programs or code, opens files, connects.
_HARMFUL_MODULES = _words(
    "os posix nt subprocess _posixsubprocess pty commands popen2 sys importlib _frozen_importlib imp _imp runpy shutil "
    "socket _socket ctypes _ctypes code codeop pdb bdb profile cProfile timeit trace doctest webbrowser platform "
    "multiprocessing _multiprocessing asyncio asyncore asynchat signal tempfile pickle _pickle cPickle dill cloudpickle "
    "shelve marshal zipimport pkgutil pydoc idlelib lib2to3 ensurepip venv pip setuptools pkg_resources distutils site http "
    "urllib urllib2 httplib requests ftplib smtplib telnetlib poplib imaplib nntplib xmlrpc socketserver sqlite3 IPython io "
    "_io gc atexit linecache pipes bz2 gzip lzma zipfile tarfile mmap fileinput winreg _winapi msvcrt aifc cgitb "
    "logging.config operator _operator unittest cmd this antigravity threading _thread concurrent compileall py_compile "
    "modulefinder rlcompleter torch.hub torch.utils.cpp_extension torch.utils.bottleneck torch.utils.collect_env "
    "torch.utils.model_zoo torch.package numpy.testing numpy.f2py numpy.distutils numpy.lib.npyio numpy.lib._npyio_impl "
    "numpy.lib._datasource numpy.ctypeslib jsonpickle joblib.parallel paramiko fabric pexpect ptyprocess "
    # their classes evaluate, compile or open what a pickle gives them
    "sympy torch.utils._sympy jinja2 mako fontTools click.utils matplotlib.dviread torch.utils._config_module "
    "fsspec s3fs gcsfs adlfs smart_open aiohttp httpx boto3 botocore "
    # thrown away, their instances call what a pickle has put into them, or close and remove what it says
    "torch.utils.data.datapipes torch.cuda.gds torch.cuda._sanitizer torch.mps.event torch._inductor torch._native "
    "torch.distributed.elastic joblib.externals scipy.io._fast_matrix_market _osx_support _aix_support _pyrepl "
    "torch.distributed._symmetric_memory torch._dynamo.backends "
    # their functions run a text, import what it names or load a library; no data has a class of theirs
    "torch.jit.unsupported_tensor_ops torch.testing._internal.jit_utils torch.testing._internal.common_utils "
    "torch.testing._internal.common_distributed torch.testing._internal.torchbind_impls torch._dynamo.functional_export "
    "torch.distributed.nn.jit torch.fx.experimental.rewriter torch.export._unlift "
    "torch._functorch._aot_autograd.subclass_codegen torch._higher_order_ops.triton_kernel_wrap "
    "torch._dynamo.bytecode_debugger torch._dynamo.trace_rules torch._dynamo.dynamo_profiler torch._dynamo.repro "
    "torch._strobelight torch._vendor.quack torch._classes torch.utils._strobelight torch.utils.model_dump "
    "torch.backends.xeon torch.cuda._memory_viz torch.cuda._utils torch.distributed.flight_recorder "
    "torch.distributed._tools.memory_tracker torch.profiler._cupti_monitor torch.onnx._internal._lazy_import "
    "torch.nn.utils._deprecation_utils scipy._lib._bunch scipy._lib._testutils scipy._lib._uarray scipy._lib.deprecation "
    "scipy._lib.array_api_compat._internal sklearn.externals.array_api_compat._internal sklearn.utils._testing "
    "sklearn.utils.discovery joblib.testing "
)  # fmt: skip
_HARMFUL = _named(
    "builtins:eval,exec,execfile,compile,__import__,open,file,input,raw_input,getattr,setattr,delattr,globals,locals,vars,"
    "breakpoint,apply,map,filter,reduce,reload,memoryview,type,super,property,classmethod,staticmethod,iter,next,exit,quit,"
    "help functools:reduce,partialmethod,cached_property,singledispatch "
    "types:FunctionType,CodeType,MethodType,LambdaType,ModuleType weakref:finalize inspect:getattr_static "
    "torch:load,compile,from_file,jit torch.jit:load,script,trace "
    "torch.serialization:load torch.fx.graph_module:reduce_graph_module,reduce_package_graph_module,reduce_deploy_graph_module,"
    "_forward_from_src,_exec_with_source "
    "torch.ops:load_library,import_module torch._ops:load_library,import_module,ops torch:classes,ops "
    "torch.classes:load_library torch.fx.operator_schemas:_torchscript_type_to_python_type torch.jit.annotations:_eval_no_call "
    "torch.jit.frontend:build_ignore_context_manager torch._dynamo.utils:import_submodule "
    "torch._dynamo.package:load_guards_state scipy.optimize._nonlin:_nonlin_wrapper "
    "torch._export.serde.serialize:deserialize_torch_artifact torch.export.pt2_archive._package:load_pt2 "
    "torch.multiprocessing.reductions:StorageWeakRef torch.profiler:ExecutionTraceObserver "
    "torch.profiler.profiler:ExecutionTraceObserver torch.cuda.graphs:CUDAGraph torch.cuda:CUDAGraph "
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter "
    "torch.distributed.checkpoint._async_process_executor:_AsyncCheckpointProcess "
    "torch._utils_internal:get_file_path numpy:DataSource,load,memmap,fromfile,loadtxt,genfromtxt,save,savez,savetxt,vectorize,"
    "apply_along_axis,frompyfunc,piecewise numpy.core._internal:_ufunc_reconstruct numpy.core:_ufunc_reconstruct "
    "numpy._core:_ufunc_reconstruct numpy.core.records:fromfile numpy.core.memmap:memmap numpy._core.memmap:memmap "
    "h5py:File h5py._hl.files:File pandas:read_pickle,eval,read_csv,read_sql pandas.io.pickle:read_pickle "
    "pandas.core.computation.eval:eval joblib:load "
    "joblib.numpy_pickle:load logging:FileHandler logging.handlers:RotatingFileHandler,SocketHandler collections:namedtuple "
    "itertools:starmap,accumulate,takewhile,dropwhile,filterfalse,groupby copyreg:add_extension,pickle,constructor "
    "codecs:open,decode,encode,lookup _codecs:decode,lookup,register dataclasses:make_dataclass enum:Enum typing:get_type_hints"
)  # fmt: skip
# These run programs and load libraries, wherever they are taken from.
_HARMFUL_ANYWHERE = _words("Popen CDLL PyDLL OleDLL WinDLL")
# Names that lead to a module wherever they stand last; other modules share theirs with functions, as `torch.trace`.
_MODULES_BY_NAME = _HARMFUL_MODULES - _words("cmd code commands pipes platform profile signal site this timeit trace")
_INSIDES = re.compile("__.*__", re.DOTALL)
# To call them does harm or makes nothing that harms by itself; to name them, as programs and enumerations do, does none.
_NAMED_FREELY = _named(
    "functools:reduce builtins:getattr,type,map,filter,property,iter,next,super,memoryview collections:namedtuple enum:Enum "
    "itertools:groupby,accumulate numpy:vectorize,memmap _functools:reduce uuid:uuid4 time:time,perf_counter,monotonic"
)
_NAMED_FREELY_MODULES = _words("operator _operator threading _thread io _io unittest")
_RUN_WHEN_IMPORTED = _words("antigravity this idlelib.idle test.autotest")
# Functions of these compute, and those of no other module of the standard library are known to do no more.
_COMPUTING = _words("builtins math cmath statistics copy json itertools random re string")

# The top-level modules of Python's standard library, 2.7 to 3.14: what they define is no user's own class.
_STANDARD = _words(
    "Queue StringIO ConfigParser HTMLParser UserDict UserList UserString __builtin__ __builtins__ cStringIO cPickle "
    "commands copy_reg dbhash dummy_thread dummy_threading formatter htmlentitydefs htmllib httplib imputil ihooks md5 "
    "mhlib mimetools multifile mutex popen2 posixfile repr rexec rfc822 robotparser sets sgmllib sha thread urllib2 "
    "urlparse whichdb xmlrpclib xmllib binhex macpath tkFileDialog annotationlib string __future__ _abc _ast _asyncio "
    "_bisect _blake2 _bootlocale _bz2 _codecs _collections _collections_abc _compat_pickle _compression _contextvars _crypt "
    "_csv _ctypes _curses _datetime _dbm _decimal _elementtree _frozen_importlib _frozen_importlib_external _functools "
    "_gdbm _hashlib _heapq _imp _interpreters _io _json _locale _lsprof _lzma _markupbase _md5 _multibytecodec "
    "_multiprocessing _opcode _operator _osx_support _pickle _posixshmem _posixsubprocess _py_abc _pydatetime _pydecimal "
    "_pyio _pyrepl _queue _random _sha1 _sha2 _sha256 _sha3 _sha512 _signal _sitebuiltins _socket _sqlite3 _sre _ssl _stat "
    "_statistics _string _strptime _struct _symtable _sysconfig _thread _threading_local _tkinter _tokenize _tracemalloc "
    "_typing _uuid _warnings _weakref _weakrefset _winapi _wmi _xxsubinterpreters _zoneinfo _zstd abc aifc antigravity "
    "argparse array ast asynchat asyncio asyncore atexit audioop base64 bdb binascii bisect builtins bz2 cProfile calendar "
    "cgi cgitb chunk cmath cmd code codecs codeop collections colorsys compileall concurrent configparser contextlib "
    "contextvars copy copyreg crypt csv ctypes curses dataclasses datetime dbm decimal difflib dis distutils doctest email "
    "encodings ensurepip enum errno faulthandler fcntl filecmp fileinput fnmatch fractions ftplib functools gc genericpath "
    "getopt getpass gettext glob graphlib grp gzip hashlib heapq hmac html http idlelib imaplib imghdr imp importlib "
    "inspect io ipaddress itertools json keyword lib2to3 linecache locale logging lzma mailbox mailcap marshal math "
    "mimetypes mmap modulefinder msilib msvcrt multiprocessing netrc nis nntplib nt ntpath nturl2path numbers opcode "
    "operator optparse os ossaudiodev pathlib pdb pickle pickletools pipes pkgutil platform plistlib poplib posix posixpath "
    "pprint profile pstats pty pwd py_compile pyclbr pydoc pydoc_data pyexpat queue quopri random re readline reprlib "
    "resource rlcompleter runpy sched secrets select selectors shelve shlex shutil signal site smtpd smtplib sndhdr socket "
    "socketserver spwd sqlite3 sre_compile sre_constants sre_parse ssl stat statistics stringprep struct subprocess sunau "
    "symtable sys sysconfig syslog tabnanny tarfile telnetlib tempfile termios textwrap this threading time timeit tkinter "
    "token tokenize tomllib trace traceback tracemalloc tty turtle turtledemo types typing unicodedata unittest urllib uu "
    "uuid venv warnings wave weakref webbrowser winreg winsound wsgiref xdrlib xml xmlrpc zipapp zipfile zipimport zlib "
    "zoneinfo test typing_extensions _aix_support _bootsubprocess _curses_panel _msi _overlapped _scproxy "
)  # fmt: skip
# A distribution of scipy.stats runs the text under this name when its state is set; what it writes itself makes functions.
PARSED, PARSER = "scipy.stats", "_parse_arg_template"
_TAKES, _GIVES, _SHAPES = r"loc=0(?:, scale=1)?", r"loc, (?:scale|1)", r"((?:[A-Za-z_]\w*, ){0,32})"
PARSER_TEXT = re.compile(
    rf"\ndef _parse_args\(self, {_SHAPES} {_TAKES}\):\n    return \(\1\), {_GIVES}\n"
    rf"\ndef _parse_args_rvs\(self, \1 {_TAKES}, size=None\):\n    return self._argcheck_rvs\(\1 {_GIVES}, size=size\)\n"
    rf"\ndef _parse_args_stats\(self, \1 {_TAKES}, moments='mv'\):\n    return \(\1\), {_GIVES}, moments\n",
    re.ASCII,
)
# Packages that are installed nearly everywhere torch is: what a pickle calls of them and no list has is dangerous.
_EVERYWHERE = _words(
    "torch numpy scipy sklearn pandas joblib matplotlib PIL yaml requests urllib3 jinja2 sympy networkx fsspec pip setuptools "
    "pkg_resources wheel IPython ipykernel torchvision torchaudio tensorflow keras jax transformers dill cloudpickle "
    "numba click rich tqdm psutil pytest _pytest py filelock tokenizers huggingface_hub accelerate safetensors six attr attrs"
)

# Nearly all calls of a checkpoint: these make data of whatever they are given.
QUIET = _DATA - HANDED.keys() - {ENCODE, PARTIAL, LOAD_FROM_BYTES}


def is_data(name: Global) -> bool:
    """Whether a global is in the documented list of data: what weights_only allows, and what makes plain values."""
    if name in _DATA or is_newer_dtype(name):
        return True
    return name.module == "numpy.dtypes" and _NUMPY_DTYPE.fullmatch(name.name) is not None


@lru_cache(maxsize=1024)
def is_harmful(name: Global) -> bool:
    """Whether to call this global is known to run code or programs, to open files or to connect."""
    if name in _DATA:
        return False
    in_module = any(module in _HARMFUL_MODULES for module in _modules(name.module))
    return name in _HARMFUL or in_module or _runs_when_imported(name.module) or _leads_to_harm(name)


def _leads_to_harm(name: Global) -> bool:
    """Whether a name leads into a module that another one has imported, or to the insides of a class."""
    *path, last = name.name.split(".", _MOST_DOTS)
    if (
        any(not _is_class_name(part) for part in path)  # an alias of a module: np.memmap
        or last in _HARMFUL_ANYWHERE
        or last in _MODULES_BY_NAME
        or "." in last
        or not _HARMFUL_MODULES.isdisjoint(path)
        or any(map(_INSIDES.fullmatch, (*path, last)))
    ):
        return True
    return bool(path) and Global(path[-1], last) in _HARMFUL


def is_harmful_to_name(name: Global) -> bool:
    """Whether it counts as a danger to name this global without a call: no data and no module refers to it."""
    if _runs_when_imported(name.module):
        return True
    if name in _NAMED_FREELY or any(module in _NAMED_FREELY_MODULES for module in _modules(name.module)):
        return False
    if not is_harmful(name):
        return False
    return name in _HARMFUL or not name.name[:1].isupper() or name.module == "subprocess" or _leads_to_harm(name)


def _runs_when_imported(module: str) -> bool:
    """Whether to import a module, as naming anything in it does, runs a program: opens a window, runs tests of the folder."""
    return module in _RUN_WHEN_IMPORTED or module.endswith(".__main__")


def is_function_of_python(name: Global) -> bool:
    """Whether this is a function of the standard library, by its first letter, that may do more than compute:"""
    is_free = name in _NAMED_FREELY or name.module.partition(".")[0] in _NAMED_FREELY_MODULES
    if is_free or not is_standard(name) or computes(name):
        return False
    return name.name.rpartition(".")[2].lstrip("_")[:1].islower()


def computes(name: Global) -> bool:
    """Whether this is of a module of the standard library whose functions compute."""
    return name.module in _COMPUTING and name.name.isidentifier()


def is_standard(name: Global) -> bool:
    """Whether a global is of Python's standard library."""
    return name.module.partition(".")[0] in _STANDARD


def of_python3(name: Global) -> Global:
    """The same with Python 2's name of `builtins`, which protocols from 3 on keep."""
    return Global("builtins", name.name) if name.module in ("__builtin__", "__builtins__") else name


def _modules(module: str) -> list[str]:
    """A module and the packages that it is in, four of them at most."""
    parts = module.split(".", 4)
    return [".".join(parts[:count]) for count in range(1, min(len(parts), 4) + 1)]


def is_class(name: Global) -> bool:
    """Whether a name is one of a class, by its first letter."""
    return _is_class_name(name.name.rpartition(".")[2])


def _is_class_name(part: str) -> bool:
    return part.lstrip("_")[:1].isupper()


def is_everywhere(name: Global) -> bool:
    """Whether a global is of the standard library, or of a package that is installed nearly everywhere torch is."""
    return is_standard(name) or name.module.partition(".")[0] in _EVERYWHERE
