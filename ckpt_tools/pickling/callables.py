"""The lists behind the verdict of a pickle: which names make data, and which do harm. docs/scan.md has the rules.

Nothing here depends on the machine: what is installed, which Python runs, and what could be imported do not count.
"""

from __future__ import annotations

import sys
from _compat_pickle import IMPORT_MAPPING

from ckpt_tools.pickling.torch_objects import LOAD_FROM_BYTES
from ckpt_tools.pickling.weights_only import ALLOWED, ALLOWED_NESTED, named
from ckpt_tools.tree.nodes import Global


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --- data

# Enumerations of packages that are everywhere: a member is pickled as a call of its class with a value, which finds it.
_ENUMERATIONS = named(
    "http:HTTPStatus,HTTPMethod re:RegexFlag uuid:SafeUUID inspect:_ParameterKind "
    "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING "
    "torch.distributed._shard.sharded_tensor.metadata:MEM_FORMAT_ENCODING "
    "torch.distributed.checkpoint.planner:WriteItemType,LoadItemType "
    "torch.distributed.fsdp.api:StateDictType,ShardingStrategy,BackwardPrefetch "
    "transformers.trainer_utils:IntervalStrategy,SchedulerType,HubStrategy,SaveStrategy,EvaluationStrategy,FSDPOption "
    "transformers.training_args:OptimizerNames,ParallelMode transformers.utils.generic:ExplicitEnum "
    "transformers.debug_utils:DebugOption accelerate.utils.dataclasses:DistributedType,PrecisionType,DynamoBackend,"
    "ComputeEnvironment,SageMakerDistributedType,RNGType,LoggerType"
)
# What calls of these give is no copy: it belongs to the program, which a state set on it changes.
_SHARED_DATA = named(
    "logging:getLogger zoneinfo:ZoneInfo._unpickle pytz:_UTC,_p types:GenericAlias "
    "typing:_GenericAlias,_UnionGenericAlias,_SpecialForm,_LiteralGenericAlias "
    "torch.nn.backends.thnn:_get_thnn_function_backend "  # of modules up to PyTorch 1.1
    # these give what they are given
    "torch.jit._pickle:build_intlist,build_floatlist,build_doublelist,build_boollist,build_tensorlist,restore_type_tag"
)
SHARED = _ENUMERATIONS | _SHARED_DATA | named("builtins:getattr,type operator:getitem _operator:getitem")
# Functions and classes that make data, whatever they are given: they call none of their arguments.
DATA = ALLOWED | ALLOWED_NESTED | _ENUMERATIONS | _SHARED_DATA | named(
    "argparse:Namespace types:SimpleNamespace array:array,_array_reconstructor random:Random itertools:count "
    "builtins:list,dict,tuple,set,frozenset,int,float,str,bytes,bytearray,complex,bool,range,slice,object "
    "collections:defaultdict,deque,ChainMap,UserDict,UserList copyreg:_reconstructor,__newobj__,__newobj_ex__ "
    "functools:partial datetime:date,time,datetime,timedelta,timezone decimal:Decimal fractions:Fraction uuid:UUID "
    "time:struct_time dataclasses:Field,_MISSING_TYPE inspect:Signature,Parameter,_empty string:Template "
    "pathlib:Path,PosixPath,WindowsPath,PurePath,PurePosixPath,PureWindowsPath "
    "pathlib._local:Path,PosixPath,WindowsPath,PurePath,PurePosixPath,PureWindowsPath "
    "ipaddress:IPv4Address,IPv6Address,IPv4Network,IPv6Network,IPv4Interface,IPv6Interface "
    "contextlib:nullcontext re:_compile logging:Logger dateutil.tz.tz:tzutc "
    "numpy:dtype,ndarray,bool_,bool,float16,float32,float64,int8,int16,int32,int64,uint8,uint16,uint32,uint64,str_,bytes_,"
    "complex64,complex128,datetime64,timedelta64,longlong,ulonglong,intc,uintc,record,recarray numpy.rec:recarray "
    "numpy.core.multiarray:_reconstruct,scalar numpy._core.multiarray:_reconstruct,scalar "
    "numpy.core.numeric:_frombuffer numpy._core.numeric:_frombuffer numpy.ma.core:_mareconstruct,MaskedArray "
    "numpy.random._pickle:__randomstate_ctor,__generator_ctor,__bit_generator_ctor numpy.random._mt19937:MT19937 "
    "numpy.random.bit_generator:SeedSequence,__pyx_unpickle_SeedSequence numpy.random._pcg64:PCG64,PCG64DXSM "
    "numpy.random._philox:Philox numpy.random._sfc64:SFC64 "
    "torch.storage:_load_from_bytes,UntypedStorage,TypedStorage torch._utils:_rebuild_sparse_csr_tensor,_rebuild_xla_tensor "
    "torch.tensor:_rebuild_from_type_v2 torch.nn.parameter:Buffer,UninitializedParameter,UninitializedBuffer "
    "torch.autograd.variable:Variable torch._C:_TensorBase,TensorBase,Generator torch.jit._pickle:build_tensor_from_id"
)  # fmt: skip
# Modules of compiled code whose classes make an instance out of sizes, numbers and arrays, and do nothing else.
COMPILED = _words("sklearn.tree._tree sklearn.linear_model._sgd_fast sklearn._loss._loss")

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
    for name in named(names)
}
RECONSTRUCTOR, GETATTR = Global("copyreg", "_reconstructor"), Global("builtins", "getattr")
ENCODE, PARTIAL = Global("_codecs", "encode"), Global("functools", "partial")
# Nearly all calls of a checkpoint: these make data of whatever they are given.
QUIET = DATA - HANDED.keys() - {ENCODE, PARTIAL, LOAD_FROM_BYTES}

# --- harm

# Modules of which everything does harm in the hands of a stranger: it runs programs or code, opens files, connects.
HARMFUL_MODULES = _words(
    "os posix nt subprocess _posixsubprocess pty commands popen2 sys importlib imp runpy shutil socket _socket ctypes "
    "_ctypes code codeop pdb bdb profile cProfile timeit trace webbrowser platform multiprocessing asyncio signal tempfile "
    "pickle _pickle cPickle dill cloudpickle jsonpickle shelve marshal zipimport pkgutil pydoc pip setuptools pkg_resources "
    "distutils http urllib urllib2 httplib requests httpx aiohttp boto3 botocore ftplib smtplib telnetlib xmlrpc sqlite3 "
    "IPython io _io gc atexit linecache gzip zipfile tarfile mmap fileinput logging.config operator _operator unittest "
    "threading concurrent paramiko fabric pexpect ptyprocess fsspec s3fs gcsfs adlfs smart_open "
    # their classes evaluate, compile or open what a pickle gives them; thrown away, their instances call or remove it
    "sympy jinja2 mako fontTools click.utils matplotlib.dviread joblib.externals joblib.parallel joblib.testing "
    "scipy._lib._bunch scipy._lib._testutils scipy.io._fast_matrix_market numpy.testing numpy.f2py numpy.distutils "
    "numpy.ctypeslib numpy.lib.npyio numpy.lib._npyio_impl numpy.lib._datasource sklearn.utils._testing torch.hub "
    "torch.package torch.testing torch._inductor torch._native torch._vendor torch._classes torch._strobelight "
    "torch._dynamo.backends torch._dynamo.repro torch.utils._sympy torch.utils._config_module torch.utils.data.datapipes "
    "torch.utils.cpp_extension torch.utils.model_zoo torch.cuda.gds torch.cuda._sanitizer torch.mps.event "
    "torch.distributed.elastic torch.distributed._symmetric_memory torch.jit.unsupported_tensor_ops torch.export._unlift "
)
HARMFUL = named(
    "builtins:eval,exec,execfile,compile,__import__,open,file,input,raw_input,getattr,setattr,delattr,globals,locals,vars,"
    "breakpoint,apply,map,filter,reduce,reload,memoryview,type,super,property,classmethod,staticmethod,iter,next,exit,quit,"
    "help functools:reduce,partialmethod,cached_property,singledispatch collections:namedtuple "
    "types:FunctionType,CodeType,MethodType,LambdaType,ModuleType weakref:finalize inspect:getattr_static "
    "torch:load,compile,jit,classes,ops torch._ops:ops,import_module torch.ops:load_library torch.serialization:load "
    "torch.jit:load,script,trace torch.fx.graph_module:reduce_graph_module,_forward_from_src,_exec_with_source "
    "torch.profiler:ExecutionTraceObserver torch.profiler.profiler:ExecutionTraceObserver torch.cuda.graphs:CUDAGraph "
    "torch.cuda:CUDAGraph torch.multiprocessing.reductions:StorageWeakRef scipy.optimize._nonlin:_nonlin_wrapper "
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter "
    "torch.distributed.checkpoint._async_process_executor:_AsyncCheckpointProcess "
    "numpy:DataSource,load,memmap,fromfile,loadtxt,genfromtxt,save,savez,savetxt,vectorize,apply_along_axis,frompyfunc "
    "numpy.core.memmap:memmap numpy._core.memmap:memmap h5py:File h5py._hl.files:File pandas:read_pickle,eval "
    "pandas.io.pickle:read_pickle joblib:load joblib.numpy_pickle:load logging:FileHandler itertools:starmap,accumulate,"
    "takewhile,dropwhile,filterfalse,groupby copyreg:add_extension codecs:open,decode,encode,lookup enum:Enum"
)
# Names that lead to a module wherever they stand last, but for those of functions, as `torch.trace`; and what runs programs and
# loads libraries.
LEAD_TO_HARM = (HARMFUL_MODULES - _words("code commands platform profile signal timeit trace")) | _words(
    "Popen CDLL PyDLL OleDLL WinDLL"
)
# To call them does harm or makes nothing that harms by itself; to name them, as programs and enumerations do, does none.
NAMED_FREELY = named(
    "functools:reduce builtins:getattr,type,map,filter,property,iter,next,super,memoryview collections:namedtuple enum:Enum "
    "itertools:groupby,accumulate numpy:vectorize,memmap _functools:reduce uuid:uuid4 time:time,perf_counter,monotonic"
)
NAMED_FREELY_MODULES = _words("operator _operator threading _thread io _io unittest")
RUN_WHEN_IMPORTED = _words("antigravity this idlelib.idle test.autotest")
# Functions of these compute, and those of no other module of the standard library are known to do no more.
COMPUTING = _words("builtins math cmath statistics copy json itertools random re string")

# The modules of Python's standard library, 2.7 to 3.14: what they define is no user's own class. C's begin with "_".
STANDARD = frozenset(sys.stdlib_module_names) | IMPORT_MAPPING.keys() | _words(
    "__builtins__ binhex dummy_threading formatter htmllib ihooks imputil macpath md5 mhlib mimetools multifile mutex popen2 "
    "posixfile rexec rfc822 sets sgmllib sha xmllib asynchat asyncore distutils imp smtpd aifc audioop cgi cgitb chunk crypt "
    "imghdr mailcap msilib nis nntplib ossaudiodev pipes sndhdr spwd sunau telnetlib uu xdrlib lib2to3 annotationlib "
    "compression typing_extensions tomllib test"
)  # fmt: skip
# Packages that are installed nearly everywhere torch is: what a pickle calls of them and no list has is dangerous.
EVERYWHERE = _words(
    "torch numpy scipy sklearn pandas joblib matplotlib PIL yaml requests urllib3 jinja2 sympy networkx fsspec pip setuptools "
    "pkg_resources wheel IPython ipykernel torchvision torchaudio tensorflow keras jax transformers dill cloudpickle "
    "numba click rich tqdm psutil pytest _pytest py filelock tokenizers huggingface_hub accelerate safetensors six attr attrs"
)
