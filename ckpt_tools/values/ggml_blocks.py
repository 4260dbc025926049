"""Blocks of ggml's quantised types as float32: each function takes blocks as rows of bytes, and gives rows of numbers.

The arithmetic is that of gguf-py's `quants.py` (`dequantize_blocks`), step by step, so that the bits are the same.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from ckpt_tools.io.content import Computed, Content, equal_chunks
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.values.ggml import BlockType
from ckpt_tools.values.numeric import ELEMENTS, as_bytes, part, trimmed
from ckpt_tools.values.pytorch import need_torch

if TYPE_CHECKING:
    import torch


# --- the grids of ggml's IQ types


# name -> (values that a code of 2 or 4 bits stands for, values in a row, the codes)
_GRIDS = {
    "IQ2_XXS": (
        (8, 25, 43), 8,
        "AAACAAUACAAKABEAFAAgACIAKAAqAEEARABQAFgAYQBkAIAAggCKAKIAAQEEARABFQFAAYQBmAEAAgICIgKCAgEEBAQQBCEEJARABEIESARgBIEE"
        "hASQBKQEAAUCBQgFIAVGBWkFgAWRBQkGEAZABoQGpAYACAUICAgUCCgIQQhECFAIUgiICAQJQAkCChQKARAEEBAQIRBAEGAQhBCQEJUQABEIESAR"
        "UBFaEYARJBJFEgAUCBQgFCUUSRSAFBgVYhUAFhYWARgEGBAYQBiBGAAZBRmgGVEaACACIAogRCBhIIAggiApIUghACICIgEkBCQQJEAkViQAJUEl"
        "ZCWQJggoICiUKEQqAUAEQBBAGEAhQCRAQEBIQFZAYECBQIRAkEAAQSBBYUGAQYVBAUIQQkhCVkJoQgBECEQgRIBEmUQSRSRFAEYBSARIEEhASEVI"
        "AElYSWFJgklFSpBKAFAIUBFQGVAgUIBQiFAEUUJRpFGRUpBUklQKVQFWVFYAWBFYGVhkWEBZCFoEYBBgQGBoYABhVWEYYmBiAGQFZBBlEmWEZUJo"
        "AIACgAqAQYCCgASBGIFAgRGCAYQEhBCEFYRAhGCEAIVGhZSFCYZAhmCGAogEiRGKBJAQkCSQQJChkBaRgJFFkgCUIpRElFGVgZggmQKgUKCFoAmh"
        "AKIYpFCoBKk="
    ),
    "IQ2_XS": (
        (8, 25, 43), 8,
        "AAACAAUACAAKABEAFAAWABkAIAAiACUAKABBAEQARgBJAFAAUgBVAFgAYQBkAIAAggCFAIgAkQCUAJkAoAABAQQBBgEJARABEgEVARgBGgEhASQB"
        "QAFCAUUBSAFRAVQBYAFoAYEBhAGQAQACAgIFAggCEQIUAiACQQJEAlACVQKAAooCAQQEBAYECQQQBBIEFQQYBCEEJARABEIERQRIBFEEVARWBGAE"
        "gQSEBJAEAAUCBQUFCAURBRQFIAVBBUQFUAVhBYAFAQYEBhAGJgZABkIGhAYACAIIBQgICAoIEQgUCCAIJQhBCEQIUAhYCIAIoAiqCAEJBAkQCUAJ"
        "gQmJCQAKIAooCpYKoAoBEAQQBhAJEBAQEhAVEBgQIRAkEEAQQhBFEEgQURBUEGAQahCBEIQQkBAAEQIRBREIERERFBEgEUERRBFQEYARlBGWEQES"
        "BBIGEhASQBJgEgAUAhQFFAgUERQUFCAUQRREFEkUUBRkFIAUARUEFRAVQBUAFhQWSRYBGAQYEBgSGEAYVBiGGAAZBRlmGVEaqRoAIAIgBSAIIAog"
        "ESAUICAgQSBEIFAggCCgIAEhBCEQIUAhSCFlIQAiIiKAIqgiASQEJBAkKSRAJAAlQSVSJZklASYaJqYmACgIKAooIChVKIgooihoKZApCCogKoIq"
        "iCqKKgFABEAGQAlAEEASQBVAGEAhQCRAQEBCQEVASEBKQFFAVEBgQGVAgUCEQJBAAEECQQVBCEERQRRBIEFBQURBUEGAQYVBokEBQgRCEEISQilC"
        "QEIARAJEBUQIRBFEFEQZRCBEQURERFBEgESURAFFBEUQRSRFQEWaRQBGCkZERlBGAUgESBBIQEhFSFRIYkgASRFJRElQSWlJBEoAUAJQBVAIUBFQ"
        "FFAgUChQQVBEUFBQgFABUQRREFEVUUBRQlEAUkRSqlIBVARUEFQhVEBUYFSBVKFUAFUIVYBViFUhVmhWoVYAWBRYQVhQWJlYGllAWUJZhVoBYARg"
        "EGBAYFRgYmCGYKlgAGEkYkpikmIAZBZkEGVAZUVlpGUBaGpoJWkGalRqYmoAgAKABYAIgBGAFIAggCqAQYBEgFCAgICCgKiAqoABgQSBBoEQgUCB"
        "UYFZgQCCIIKAgoKCoIKoggGEBIQQhBKEFYRAhGCEiYQAhUSFpYUYhmqGAIgIiCWIWoiAiIKIqIgGiSKKgIqIipaKqIoBkASQEJBAkFaQhJAAkSKR"
        "ZJFWkomSAJQFlESUUJRYlCmVkJWSlUGWUZimmEmZFZpgmgCgAqAIoAqgIKAqoKCgUaFZoaahAKICogiiKqKAoqCiQKSVpGWmmKYKqCCoIqgoqKCo"
        "qKgEqYSphqkoqiqqkaqqqg=="
    ),
    "IQ2_S": (
        (8, 25, 43), 8,
        "AAACAAUACAAKABEAFAAWABkAIAAiACUAKABBAEQARgBJAFAAUgBVAFgAYQBkAGYAaQCAAIIAhQCIAJEAlACgAKUAqgABAQQBBgEJARABEgEVARgB"
        "IQEkAUABQgFFAUgBUQFUAVYBWQFgAWUBaAGBAYQBkAGSAZUBoQGkAQACAgIFAggCEQIUAiACKgJBAkQCRgJJAlACVQKAAoUCigKUAqICAQQEBAYE"
        "CQQQBBIEFQQYBCEEJAQmBCkEQARCBEUESARKBFEEVARWBFkEYARiBGUEgQSEBIYEiQSQBJUEmAShBKQEAAUCBQUFCAUKBREFFAUWBRkFIAUlBSgF"
        "QQVEBUYFSQVQBVIFVQVYBWEFZAWABYIFhQWIBZEFlAWgBQEGBAYGBgkGEAYVBkAGRQZIBlEGVAZgBoEGhAaQBgAIAggFCAgIEQgUCBYIGQggCCUI"
        "KghBCEQIRghJCFAIUghVCFgIYQhkCIAIhQiUCKoIAQkECRAJEgkVCRgJIQlACUUJSAlRCVQJYAmBCZAJAAoRChQKIgooCioKUAqZCgEQBBAGEAkQ"
        "EBASEBUQGBAhECQQJhBAEEIQRRBIEFEQVBBWEFkQYBBiEGUQaBCBEIQQhhCQEJUQmBChEKQQABECEQURCBEKERERFBEWERkRIBEiESURKBFBEUQR"
        "RhFJEVARUhFVEVgRYRFkEYARghGFEYgRkRGUEQESBBIJEhASFRIhEiQSQBJFElESVBKBEoQSkBIAFAIUBRQIFBEUFBQWFBkUIBQlFCgUQRREFEYU"
        "SRRQFFIUVRRYFGEUZBSAFIIUhRSIFJEUlBSgFAEVBBUGFQkVEBUSFRUVGBUhFSQVQBVCFUUVSBVRFVQVYBWBFYQVkBUAFgUWCBYRFhQWIBZBFkQW"
        "UBaAFqoWARgEGAYYCRgQGBUYGBghGEAYQhhFGEgYURhUGGAYgRiEGAAZAhkFGQgZERkUGSAZQRlEGVAZaRmiGQQaEBpAGlYaACACIAUgCCARIBQg"
        "FiAZICAgJSAqIEEgRCBQIFIgVSBkIIAgiiCUIKogASEEIRAhEiEVISEhQCFCIUUhUSFUIWAhgSGEIZAhACIKIiIiKCIqIkQiUCKIIooiqCIBJAQk"
        "BiQJJBAkFSQYJCEkJCRAJEIkRSRIJFEkVCRgJIEkhCSQJAAlBSUIJRElFCUgJUElRCVQJWYlgCUBJgQmECZAJlkmACgFKBEoFChBKEQoUCiKKKoo"
        "ASkEKRAplSkKKiIqZCqIKooqAUAEQAZACUAQQBJAFUAYQBpAIUAkQCZAQEBCQEVASEBKQFFAVEBWQFlAYEBiQGVAgUCEQJBAlUCYQKFApEAAQQJB"
        "BUEIQRFBFEEWQRlBIEEiQSVBQUFEQUZBSUFQQVJBVUFYQWFBZEGAQYJBhUGIQZFBlEGgQQFCBEIQQhJCFUIYQiRCQEJFQkhCUUJUQmBCgUKEQgBE"
        "AkQFRAhECkQRRBREFkQZRCBEIkQlRChEQUREREZESURQRFJEVURYRGFEZESARIJEhUSIRJFElESgRAFFBEUGRQlFEEUSRRVFGEUhRSRFQEVCRUVF"
        "SEVRRVRFYEVqRYFFhEWQRQBGAkYFRghGEUYURiBGQUZERlBGgEalRgFIBEgJSBBIEkgVSBhIIUgkSEBIQkhFSEhIUUhUSGBIhEiQSABJAkkFSQhJ"
        "EUkUSSBJQUlESVBJgEmWSQFKBEoQSkBKAFACUAVQCFARUBRQFlAZUCBQIlAlUChQQVBEUEZQSVBQUFJQVVBYUGFQZFCAUIJQhVCIUJFQlFABUQRR"
        "BlEJURBRElEVURhRIVEkUUBRQlFFUUhRUVFUUWBRgVGEUZBRAFIFUghSEVIUUiBSQVJEUlBSaVKAUgFUBFQGVAlUEFQSVBVUGFQhVCRUQFRCVEVU"
        "SFRRVFRUYFSBVIRUkFQAVQJVBVUIVRFVFFUgVUFVRFVQVYBVAVYEVhBWJlZAVgBYAlgFWAhYEVgUWCBYQVhEWFBYWliAWAFZBFkQWUBZAFoZWoVa"
        "qFoBYARgBmAQYBJgFWAYYCFgJGBAYEVgSGBRYFRgYGCEYJBgAGECYQVhCGERYRRhIGFBYURhUGGAYZlhBGIQYkBiVmKhYgBkBWQIZBFkFGQgZEFk"
        "RGRQZIBkAWUEZRBlQGVKZWhlkmUAZpRmAWgEaBBoZWiYaABpKmlCaqFqAIACgAWACIARgBSAGYAggCWAQYBEgFCAUoBVgFiAYYCAgIWAkYCUgAGB"
        "BIEJgRCBEoEVgRiBIYEkgUCBQoFFgUiBUYFUgYGBhIGQgamBAIIFggqCEYIUgkGCRIJQggGEBIQGhAmEEIQShBWEGIQhhECEQoRFhEiEUYRUhGCE"
        "gYSEhJCEAIUChQWFCIURhRSFIIVBhUSFUIWAhYqFAYYEhhCGKYZAhgCIBYgRiBSIQYhEiFCIoogBiQSJQIlliSKKWIpaioKKoooBkASQCZAQkBKQ"
        "FZAYkCSQQJBCkEWQSJBRkFSQYJCBkISQkJAAkQWREZEUkUGRRJFQkVqRAZIEkhCSQJKmkgCUApQFlAiUEZQUlCCUQZRElFCUgJSWlAGVBJUQlUCV"
        "mJWhlQCWRpZklgGYBJgQmCaYQJipmACZSZlSmZCaAKAFoAqgFKAioCqgQaBEoFCgoqCqoEChZaECogqiIqIooiqigqKIooqiqKIBpASkEKRApImk"
        "pKQApRmlUaYKqCiooqhUqYapCKoKqiCqIqooqoiqqqo="
    ),
    "IQ3_XXS": (
        (4, 12, 20, 28, 36, 44, 52, 62), 4,
        "AAACAAQAEQATABcAIAAiADEAQgBzAHUAAQEDARABEgEhASUBMAEyAUEBVAFwAQACAgIEAhECIAIiAjECMwI3AlECVwJ1AgEDBwMQAxIDJQNwAxME"
        "NwREBFcEcwR1BAEFBwUyBVIFNQZkBhAHFAcWB0MHYQcBEAMQEBASECEQIxAwEDIQNBBHEFAQABECERERIBEiEQESAxIQEhISIRIwEnISABMCEyAT"
        "MRNGE2YTARQFFFAUIBUkFUYVcRUFFiIXQBcAIAIgESATICAgIiAmIDEgQiABIQMhBSEQIRIhISEwIWMhZyFwIQAiAiIRIhciICIiIjciQCJVIgEj"
        "ECMUI3AjdCM1JFMkAyUnJUEldCUBJwMnFidFJwEwEDASMCEwIzBQMGUwcjAAMQIxIDExMUQxRjEBMgMyEDIlMlIycjIRMzMzMDRHNHI0ADUGNSI1"
        "VTUUNjY2YzYzN2A3BEAXQDVAN0BTQFdAdEEgQjdCQEJgQmZCB0NFQwREUURkRCVFQ0VwRQVHEEcSRzBHElBBUHBQAFEGUSZRVVEUUjJSclICU1NT"
        "EFQjVCdUclQCVTFVUFYkV0JXJGBEYEZgZGAhYWFhF2JkYjBjNmNEZAVlUmUzZgNnIWcDcAVwB3AQcDJwUnAmcUBxEnJFclJyAHMVczNzYHMhdEF0"
        "AHUCdSR1MHY="
    ),
    "IQ3_S": (
        (1, 3, 5, 7, 9, 11, 13, 15), 4,
        "AAABAAIABQAHABAAEQASABQAFgAgACEAJQAzAEAAQgBFAEcAUQBTAGAAYgBxAHQAdwAAAQEBAgEEARABEQEVASABIwEnATEBNQFEAWEBZQFyAQAC"
        "AQIFAgcCEAITAhYCIQIlAjACNAJCAkUCRwJRAlMCcAJzAgMDEQMVAyADIgMxAzMDNgNEA1ADUgNnA3EDdQMABBMEFwQhBCQEMgRABEMEUQRwBAIF"
        "BAUgBSIFJgUzBUEFRQVHBWYFcwUGBhEGEwYxBlIGcQYABwIHBAcgByIHJgczB1AHVAcAEAEQAhAEEBAQERATEBUQFxAgECIQMRA0EDYQVBBWEGEQ"
        "chAAEQERAxEGERARFBEhETARMxFBEVARUhFwEXYRABISEhUSFxIgEiQSMhJAEkMSVRJgEnISARMEEwcTEBMTEyETJxMwEzQTQRNiE3ATAxQFFBIU"
        "FBQxFDMUQhRGFFAUVBQBFRAVExUhFTAVMhVRFSAWJBYnFkQWRhYBFwMXEBcSFyEXNRdBF2IXcBcAIAEgAyAFIAcgECASIBQgFiAhICMgJyAwIDIg"
        "QSBDIEUgUCBSIGcgcCBzIHUgACECIRAhEyEXISIhJSExITQhQiFRIQEiBCIHIiEiIyIwIjciQSJTIlcicSJ0IgAjAiMFIxEjIiMkIzEjMyNCI1Aj"
        "ZiMBJAckICQjJDIkNSRBJHIkdSQEJRElIiU3JUAlUyVwJQAmAiYHJiEmVSZhJgUnEScmJzAnQydQJwIwETATMBUwFzAiMDEwMzA1MEIwRDBHMFEw"
        "YzBxMAExAzEFMRQxITEjMUAxYDFyMXYxADISMiAyMjI0MlAyATMQMxQzITMjMyczMDNBM0MzRzNVM3MzAzQRNBY0IjQxNFI0YDRkNAE1EDUSNSU1"
        "MjVENVY1czUWNkE2ATcDNyA3Ijc1NwBABEASQCBAJEAnQDJAQUBQQHBAAkEHQRFBE0EiQTBBNUFDQVFBVUEBQgNCEEIVQiFCM0JAQldCYkJwQgRD"
        "EUMTQyBDIkMxQzVDAEQCRCREN0RARHFEBUUHRSFFYkUTRjRGYEYQRxVHMEdDR1FHAlAQUBRQIlBAUERQR1BSUGZQdFABUQNRBVESUSFRMlFyUQBS"
        "EVIjUjBSNlJTUgJTB1MQUydTRFNRU2VTc1MBVARUIFQyVEZUElUmVVFVU1VCVgJXBFciVxFgE2AVYDFgM2BgYABhIGEnYWRhEmI0YkJiVWJiYnBi"
        "AGMUYyFjQGMlZENkYmQAZQNlNGVgZQVmQGYRZxNnAHAEcAdwIHAicDZwQHBUcGJwAnERcSRxQ3FFcQFyBHIQchZyIXIwclFyAnMyczVzU3MBdAV0"
        "E3QgdFB0InVCdQJ2MXYAdw=="
    ),
    "IQ1_S": (
        (-1, 0, 1), 8,
        "AAACAAUACAAKABEAFQAgACIAKAAqAEUAUQBUAFYAZQCAAIIAiACKAJUAoACiAKgAqgAEAQUBEQEUARYBGQEaASUBQQFGAUkBUgFVAVoBYQFkAWYB"
        "aAGFAZEBlAGWAaUBAAICAggCCgIVAiACIgIoAioCRQJRAlkCZAJpAoACggKIAooCkQKVApkCoAKiAqgCqgIRBBQEFgQlBEEESQRVBFoEZARlBJEE"
        "mQSlBAEFBAUFBQYFFQUYBRoFKQVABUUFSgVQBVEFVAVVBVYFWQVgBWIFZQVoBWoFgQWRBZUFmAWaBaEFpAWlBaYFqQUUBhkGQQZEBlAGUgZVBlgG"
        "YAZhBmYGaQaFBpEGlAaZBgAIAggICAoIFQggCCIIKAgqCEUIUQhWCGUIgAiCCIgIigiVCKAIogioCKoIBQkRCRQJGQkkCSUJQQlQCVEJVQlhCWQJ"
        "aQmRCZQJlgmZCaUJAAoCCggKCgoVCiAKIgooCioKRQpRClkKYQplCoAKggqFCogKigqVCqAKogqoCqoKEBAREBQQGRAkECUQQRBEEFAQVRBYEGEQ"
        "ZBBlEGkQkRCUEJYQoRClEAERBBEGEQkREBESERURGBEhESQRKRFFEUoRUBFREVIRVBFVEVYRWRFgEWURhBGSEZURoRGkERESFBIWEiUSQBJGEkkS"
        "UhJVElgSWhJkEmYShRKREpQSlhKlEgEUBhQJFBQUFRQYFBkUIRQmFEEURRRGFEgUShRRFFQUVRRWFFkUYhRlFGgUhBSJFJAUlBSVFJgUmRSaFKEU"
        "pBSlFKkUAhUFFQoVERUUFRUVFhUZFSAVIhUlFSgVKhVBFUQVRRVGFVEVUhVUFVUVVhVZFVoVYRVkFWUVZhVpFYAVghWEFYUViBWKFZAVkRWUFZUV"
        "lhWZFZoVoBWiFaUVARYEFgUWBhYVFhYWGBYaFiEWJhZAFkIWRBZFFkgWShZRFlUWVhZYFlkWYRZkFmUWaBZpFmoWhhaKFpIWlRakFqkWERgWGCUY"
        "QRhEGEYYSRhQGFUYWBhaGGAYYRhkGGYYaRiFGJEYlBilGBAZEhkVGRoZIRklGUIZRBlFGUgZURlUGVUZVhlZGVoZYBllGWoZiRmRGZIZlRmYGaEZ"
        "phmpGQkaFhokGiYaRBpGGkkaUBpSGlUaWBphGmYaaRqFGpEalhqaGgAgAiAIIAogFSAgICIgJSAoICogRSBRIFkgYSBlIIAggiCIIIoglSCgIKIg"
        "pSCoIKogBSERIRQhGSElIUIhRCFJIVUhWCFaIWEhZCFlIWYhhSGQIZYhmSGlIQEiCCIKIhEiFSIgIiIiKCIqIkUiUSJWIlkiZSKBIogiiiKRIpUi"
        "oCKiIqgiqiIFJBQkFiQZJCUkRCRFJEYkSSRSJFUkWCRaJGYkhSSRJJQkmSShJKUkCSUVJSElKSVAJUUlSCVRJVQlVSVZJWIlZSVoJYklkCWUJZUl"
        "mCWaJaElpCWmJaklBSYQJhImGSYlJkEmSSZVJmAmYSZpJoQmhiaQJpomACgCKAgoCigVKCAoIigoKCooRShRKFQoZSiAKIIoiCiKKKAooiioKKoo"
        "CSkRKRQpGSklKUYpSSlSKVUpYSlkKWYpaSmFKZAplimZKaQppSkAKgIqCCoKKiAqIiooKioqRSpRKlYqWSplKoAqgiqIKooqlSqgKqIqqCqqKgVA"
        "EUAWQCVASUBSQFVAWEBaQGFAZEBmQJRAmUChQKZAAEEBQQRBBkEJQRJBFUEWQRhBGkEhQSZBKUFFQUhBSkFRQVRBVUFWQVlBWkFlQWhBakGBQYRB"
        "hkGQQZJBlUGgQaFBokEFQhFCFEIWQiVCQUJSQlVCWkJkQmlCiUKUQqVCAUQVRBlEKURFREhESkRRRFREVURWRGFEYkRlRGhEakSBRIZEiUSQRJJE"
        "lUSgRKFEqUQBRQJFBUUKRRFFFEUVRRZFGUUgRSVFKkVBRURFRUVGRUlFUEVRRVRFVUVWRVhFWUVhRWRFZUVmRWlFgkWERYVFiEWRRZRFlUWWRZlF"
        "mkWlRahFqkUBRgVGCUYURhVGGEYaRiFGJEYpRkBGQkZFRkhGUEZRRlJGVUZWRllGYkZlRmhGgUaFRopGlEaVRqFGpEamRgVIEUgVSBpIJUhCSElI"
        "UEhVSFhIYUhkSGZIaUiFSJFIlEiWSJlIpUgBSQVJBkkKSRBJFEkVSRhJIUkkSSZJQElFSUpJUUlSSVRJVUlWSVlJYEliSWVJZklqSYZJiUmSSZVJ"
        "lkmYSaFJpEmmSalJFkpESkZKSUpVSlhKWkpkSmlKlEqlSgFQBFAFUAZQCVASUBVQGlAhUCRQKVBAUEVQSFBRUFRQVVBWUFlQZVBoUIZQiVCVUJhQ"
        "oFChUKZQqVAFUQhRCVEKURFRFFEVURZRGFEZUSBRJVEmUShRKlFBUURRRVFGUUlRUFFRUVJRVFFVUVZRWFFZUVpRYVFkUWVRZlFpUYJRhVGRUZRR"
        "lVGWUZlRoFGlUapRAVIGUhJSFVIaUiFSJFJCUkVSSlJRUlRSVVJWUllSYlJlUoVSkFKSUpVSmVKaUqRSBFQFVBFUFFQVVBZUGFQZVCFUJVQoVCpU"
        "QVREVEVURlRJVEpUUFRRVFRUVVRWVFhUWVRaVGFUYlRkVGVUZlRpVIBUiFSKVJFUlFSVVJZUmVShVKRUpVSqVAFVAlUEVQVVBlUJVRBVEVUSVRRV"
        "FVUWVRlVGlUhVSRVJVUmVSlVQFVBVUJVRFVFVUZVSFVJVVBVUVVSVVRVVVVWVVhVWVVaVWBVYVVkVWVVZlVoVWlValWBVYRVhVWJVYpVkFWRVZRV"
        "lVWWVZhVmVWhVaRVpVWmValVAFYBVgJWBFYGVghWCVYRVhRWFVYYVhlWIFYhViJWJFYlViZWKFYpVkFWRVZGVkhWSVZKVlBWUVZSVlRWVVZWVlhW"
        "WVZaVmFWZFZlVmlWglaFVoZWiFaJVopWkVaVVppWolalVqZWqFapVgRYBVgGWAlYEFgVWBhYIVgqWEVYSFhKWFFYVFhVWFZYWFhZWGBYYlhkWGVY"
        "gliJWJBYkliVWJhYoVipWAFZAlkFWQpZEVkUWRVZFlkZWSVZQVlEWUVZRllJWVBZUVlSWVRZVVlWWVhZWVlaWWFZZFllWWZZaVmBWYVZiVmRWZRZ"
        "lVmWWZhZmVmlWQRaCFoVWhpaIFolWiZaKVpFWkhaSVpRWlVaVlpYWllaYlplWmhaalqBWopaklqVWpZamFqaWqFaBWAUYBZgGWAlYERgUGBVYFZg"
        "WGBaYGFgZGBmYGlggWCWYKVgAWEEYQZhCWESYRVhIWEiYSZhKWFFYUlhUWFVYVZhWWFlYWZhamGEYYphkmGVYaFhpmGpYRFiFmIZYkBiQWJGYlVi"
        "VmJYYmBihWKRYpZipWIRZBJkFWQWZBpkIWQmZClkQGRCZEVkSGRKZFFkVGRVZFZkWWRaZGBkYmRlZIRkhWSJZJBkkmSUZJVklmSYZJpkoWSkZKlk"
        "BWUIZQplEWUVZRZlGWVEZUVlRmVJZVBlUWVUZVVlVmVZZWFlZGVlZWZlaWWGZYllimWRZZVllmWZZZplomWlZaZlqGUCZglmFWYgZiZmKGYpZkBm"
        "RWZIZkpmUWZUZlVmVmZYZlpmYGZlZmhmgGaCZoVmimaUZpZmmGaZZqBmpGamZqpmFmgZaCVoQWhSaFVoWmhhaGlohWiRaJhopmgBaQRpEGkVaSFp"
        "JGkmaSlpQGlBaUVpRmlIaVFpVGlVaVZpWWlgaWVpammCaYRpimmVaaFppGmlaalpEWoWahhqQWpEaklqUGpValhqWmpkamVqaWqGapRqmGqaaqZq"
        "AIACgAiACoAggCKAKIAqgEWAUIBRgFSAVoBZgGWAgICCgIiAioCVgKCAooCogKqABYERgRSBFoEZgSWBQYFEgUmBUIFSgVWBVoFYgVmBZIFmgWmB"
        "hYGJgZSBloGZgaWBAIICggiCCoIVgiCCIoIogiqCUYJUglmCZYKAgoKCiIKKgpWCoIKigqiCqoIUhBmEQYREhFGEVYRahGGEZIRphJSEmYQBhQmF"
        "EoUVhRqFJoUphUCFQYVFhUiFUYVUhVWFVoVZhVqFZYVmhWiFaoWBhYSFhoWJhZCFkoWVhZiFpoURhhaGGYYlhkGGRIZJhkqGUIZVhlmGWoZhhmaG"
        "aoaFhpGGmoakhgCIAogIiAqIFYggiCKIKIgqiEGIRYhRiFSIWYhliGmIgIiCiIiIioiViKCIooioiKqIBYkGiRGJFIkWiSWJQYlEiUaJSYlQiVKJ"
        "VYlaiWGJZImFiZaJmYmliQCKAooIigqKFYogiiKKKIoqikWKUYpUilaKgIqCioiKioqViqCKooqoiqqKBZARkBaQGJAZkCWQQZBGkEmQVZBYkFqQ"
        "aZBqkIWQkZCUkJaQmZClkAGRBJEGkQmREJEVkRiRGpEhkSSRJpEpkUCRRZFQkVGRVJFVkVaRWZFikWWRhJGGkZKRlZGYkaGRpJGmkamRBZIRkhSS"
        "GZIlkkSSRpJJklCSUpJVkliSZpJpkoWSlJKWkqmSAZQElAaUEJQVlBiUJpRAlEqUUZRUlFWUVpRYlFmUYJRhlGKUZZSElIaUkpSUlJWUmJShlKmU"
        "AJUFlQiVCpUQlRGVFJUVlRaVGZUhlSWVKZUqlUGVRJVFlUaVSZVQlVGVUpVUlVWVVpVYlVmVWpVhlWSVZZVmlWmVgZWFlYiVkZWSlZSVlZWWlZmV"
        "mpWglaKVpZWolaqVAZYElhCWFZYZliCWJpYplkWWSJZJllGWUpZVllaWWZZllmiWgpaElomWipaSlpSWlZaklqaWqZYFmBaYGZglmEGYRphQmFKY"
        "VZhWmFqYZJhlmIWYkZiWmJmYpZgEmQaZCZkQmRKZFZkYmRqZIJkhmSSZJplAmUKZRZlImUqZUZlUmVWZVplZmWKZZZlmmWqZgZmEmZCZkpmVmZqZ"
        "oZmmmQWaFZolmkSaRppJmlCaVZpYmmGahZqRmpSalZqWmgCgAqAIoAqgFaAgoCKgKKAqoEWgUaBUoFagWaCAoIKgiKCKoJWgoKCioKigqqAFoQmh"
        "EaEUoRahGaEaoUahSaFRoVWhWKFaoWGhZKGFoZChkqGWoZmhAqIIogqiEKIZoiKiKKIqokWiUaJWolmiZaKAooKiiKKKopWioKKioqiiqqIZpCWk"
        "QaREpFCkVKRVpFikWqRhpGWkZqRopGmkhaQGpQmlEKUSpRWlGKUmpSmlQqVFpVGlVKVVpValWaVlpWqlgaWEpYWlhqWJpZKllaWYpQWmEaYWphqm"
        "IaYlpkSmRqZKplKmVaZWplimYKZipoamkKaVppammaahpqSmpqYAqAKoCKgKqCCoIqgoqCqoUahUqFaoWaiAqIKoiKiKqJWooKiiqKioqqgFqRSp"
        "GakhqSWpQalQqVWpWqlhqWapaamQqZapAKoCqgiqCqogqiKqKKoqqlGqVKpWqoCqgqqIqoqqlaqgqqKqqKqqqg=="
    ),
}  # fmt: skip
# The signs of eight values, by the seven bits that a code has of them: the eighth makes their number even.
_SIGNS = bytes(code | (code.bit_count() % 2) << 7 for code in range(128))


@cache
def grid(name: str) -> torch.Tensor:
    """The rows of a type, as float32."""
    import torch

    values, width, text = _GRIDS[name]
    bits = 4 if len(values) > 4 else 2
    packed = torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    codes = (packed.unsqueeze(1) >> shifts) & ((1 << bits) - 1)
    return torch.tensor(values, dtype=torch.float32)[codes.flatten().long()].reshape(-1, width)


@cache
def signs() -> torch.Tensor:
    """For each code of seven bits eight factors, 1 or -1."""
    import torch

    codes = torch.frombuffer(bytearray(_SIGNS), dtype=torch.uint8)
    return 1 - 2 * ((codes.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1).float()


_FLOAT32 = DTYPES["float32"]


def numbers_of(content: Content, kind: BlockType) -> Content:
    """The float32 numbers of blocks, some thousand at a time; a range of them needs the blocks that it touches alone."""
    unpack, whole = _KINDS[kind.name], kind.elements * _FLOAT32.itemsize

    def work() -> Iterator[memoryview]:
        need_torch("The numbers of quantised blocks are worked out with it.")
        import torch

        for data in equal_chunks(content, ELEMENTS // kind.elements * kind.nbytes):
            blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, kind.nbytes)
            yield as_bytes(unpack(blocks).reshape(-1), _FLOAT32)

    def inside(start: int, length: int) -> Content:
        first, last = start // whole, -(-(start + length) // whole)
        blocks = part(content, first * kind.nbytes, (last - first) * kind.nbytes)
        return trimmed(numbers_of(blocks, kind), start - first * whole, length)

    return Computed(content.length // kind.nbytes * whole, work, content, inside)


# --- parts of a block


def _half(raw: torch.Tensor) -> torch.Tensor:
    """Halves as float32."""
    import torch

    return raw.contiguous().view(torch.float16).float()


def _words(raw: torch.Tensor) -> torch.Tensor:
    """Numbers of 16 bits without a sign."""
    import torch

    return raw.contiguous().view(torch.int16).int() & 0xFFFF


def _long_words(raw: torch.Tensor) -> torch.Tensor:
    """Numbers of 32 bits without a sign."""
    import torch

    return raw.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def _fields(raw: torch.Tensor, width: int, bits: int, mask: int) -> torch.Tensor:
    """The fields of bytes that stand in groups of `width`: the lowest bits of a whole group first, then the next."""
    import torch

    shifts = torch.arange(0, 8, bits, dtype=raw.dtype).unsqueeze(1)
    return ((raw.reshape(len(raw), -1, 1, width) >> shifts) & mask).reshape(len(raw), -1)


def _of_each(values: torch.Tensor, step: int, count: int, mask: int) -> torch.Tensor:
    """The fields of each number, the lowest first: `count` of them, `step` bits apart, along a new last dimension."""
    import torch

    return (values.unsqueeze(-1) >> torch.arange(0, step * count, step, dtype=values.dtype)) & mask


# --- 32 numbers and a scale


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks[:, :2]) * (_fields(blocks[:, 2:], 16, 4, 15).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks[:, :2]) * _fields(blocks[:, 4:], 16, 4, 15).float() + _half(blocks[:, 2:4])


def _fifth_bit(four: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return four | (_of_each(high, 1, 8, 1).reshape(len(high), -1) << 4)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _fifth_bit(_fields(blocks[:, 6:], 16, 4, 15), blocks[:, 2:6])
    return _half(blocks[:, :2]) * (codes.float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _fifth_bit(_fields(blocks[:, 8:], 16, 4, 15), blocks[:, 4:8])
    return _half(blocks[:, :2]) * codes.float() + _half(blocks[:, 2:4])


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks[:, :2])


# --- K: 256 numbers, with scales of scales


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, d, low = blocks[:, :16], _half(blocks[:, 80:82]), _half(blocks[:, 82:84])
    codes = _fields(blocks[:, 16:80], 32, 2, 3).reshape(-1, 16, 16).float()
    steps, offsets = d * (scales & 15).float(), low * (scales >> 4).float()
    return steps.unsqueeze(2) * codes - offsets.unsqueeze(2)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    packed, d = blocks[:, 96:108], _half(blocks[:, 108:110])
    low, high = _fields(packed[:, :8], 8, 4, 15), _fields(packed[:, 8:], 4, 2, 3)
    steps = d * ((low | (high << 4)).float() - 32)
    codes = _fields(blocks[:, 32:96], 32, 2, 3).float()
    above = _fields(blocks[:, :32], 32, 1, 1).float()  # where the bit is set nothing is taken off
    return steps.unsqueeze(2) * (codes - (1 - above) * 4).reshape(-1, 16, 16)


def _scales_of_k(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight offsets of six bits each, in twelve bytes."""
    import torch

    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], dim=1)
    offsets = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], dim=1)
    return scales.float(), offsets.float()


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, offsets = _scales_of_k(blocks[:, 4:16])
    codes = _fields(blocks[:, 16:], 32, 4, 15).reshape(-1, 8, 32).float()
    return (_half(blocks[:, :2]) * scales).unsqueeze(2) * codes - (_half(blocks[:, 2:4]) * offsets).unsqueeze(2)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, offsets = _scales_of_k(blocks[:, 4:16])
    codes = _fields(blocks[:, 48:], 32, 4, 15) | (_fields(blocks[:, 16:48], 32, 1, 1) << 4)
    steps, offset = _half(blocks[:, :2]) * scales, _half(blocks[:, 2:4]) * offsets
    return steps.unsqueeze(2) * codes.reshape(-1, 8, 32).float() - offset.unsqueeze(2)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    codes = _fields(blocks[:, :128], 64, 4, 15) | (_fields(blocks[:, 128:192], 32, 2, 3) << 4)
    return (_half(blocks[:, 208:210]) * scales).unsqueeze(2) * (codes.float() - 32).reshape(-1, 16, 16)


# --- three values, and floats of four bits


def _tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8).unsqueeze(1)
    parts = ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    codes = [(raw.unsqueeze(1) * powers[:count]).reshape(len(raw), -1) for raw, count in parts]  # the product wraps, as meant
    return _half(blocks[:, 52:54]) * (((torch.cat(codes, dim=1).int() * 3) >> 8).float() - 1)


def _tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks[:, 64:66]) * (_fields(blocks[:, :64], 32, 2, 3).float() - 1)


# twice the values of float4_e2m1fn; the scales are halved for it
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _looked_up(codes: torch.Tensor, values: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.tensor(values, dtype=torch.float32)[codes.long()]


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    exponent = blocks[:, :1].int()
    small = torch.tensor(0x00200000, dtype=torch.int32) << exponent.clamp(max=1)
    scale = torch.where(exponent < 2, small, (exponent - 1) << 23).view(torch.float32)
    return scale * _looked_up(_fields(blocks[:, 1:], 16, 4, 15), _DOUBLED)


def _nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    raw = blocks[:, :4]
    exponent, mantissa = ((raw >> 3) & 15).float(), (raw & 7).float()
    scale = torch.where(exponent == 0, mantissa * 2**-9, (1 + mantissa / 8) * torch.exp2(exponent - 7)) * 0.5
    scale = torch.where((raw == 0) | (raw == 0x7F), 0.0, scale)
    codes = _fields(blocks[:, 4:], 8, 4, 15).reshape(-1, 4, 16)
    return scale.unsqueeze(2) * _looked_up(codes, _DOUBLED)


_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks[:, :2]) * _looked_up(_fields(blocks[:, 2:], 16, 4, 15), _NONLINEAR)


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    high = _of_each(_words(blocks[:, 2:4]), 2, 8, 3).reshape(-1, 8)
    low = _of_each(blocks[:, 4:8], 4, 2, 15).reshape(-1, 8).int()
    steps = _half(blocks[:, :2]) * ((low | (high << 4)) - 32).float()
    return steps.unsqueeze(2) * _looked_up(_fields(blocks[:, 8:], 16, 4, 15), _NONLINEAR).reshape(-1, 8, 32)


# --- IQ: codes stand for rows of a grid


def _own_signs(raw: torch.Tensor) -> torch.Tensor:
    """A factor of 1 or -1 for each bit."""
    return 1 - 2 * _of_each(raw, 1, 8, 1).float()


def _steps(d: torch.Tensor, scales: torch.Tensor, factor: float) -> torch.Tensor:
    return (d * (0.5 + scales.float()) * factor).unsqueeze(2).unsqueeze(3)


def _iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    codes = blocks[:, 2:].reshape(-1, 8, 2, 4)
    packed = _long_words(codes[:, :, 1]).reshape(-1, 8)
    rows = grid("IQ2_XXS")[codes[:, :, 0].long()]
    return _steps(_half(blocks[:, :2]), packed >> 28, 0.25) * rows * signs()[_of_each(packed, 7, 4, 127)]


def _iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    codes = _words(blocks[:, 2:66]).reshape(-1, 16, 2)
    scales = _of_each(blocks[:, 66:], 4, 2, 15).reshape(-1, 16)
    rows = grid("IQ2_XS")[(codes & 511).long()]
    return _steps(_half(blocks[:, :2]), scales, 0.25) * rows * signs()[(codes >> 9).long()]


def _iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    high = _of_each(blocks[:, 66:74], 2, 4, 3).reshape(-1, 32).int()
    codes = (blocks[:, 2:34].int() | (high << 8)).reshape(-1, 16, 2)
    scales = _of_each(blocks[:, 74:], 4, 2, 15).reshape(-1, 16)
    own = _own_signs(blocks[:, 34:66]).reshape(-1, 16, 2, 8)
    return _steps(_half(blocks[:, :2]), scales, 0.25) * grid("IQ2_S")[codes.long()] * own


def _iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    packed = _long_words(blocks[:, 66:])
    rows = grid("IQ3_XXS")[blocks[:, 2:66].long()].reshape(-1, 8, 4, 8)
    return _steps(_half(blocks[:, :2]), packed >> 28, 0.5) * rows * signs()[_of_each(packed, 7, 4, 127)]


def _iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    high = _of_each(blocks[:, 66:74], 1, 8, 1).reshape(-1, 64).int()
    rows = grid("IQ3_S")[(blocks[:, 2:66].int() | (high << 8)).long()].reshape(-1, 8, 4, 8)
    scales = _of_each(blocks[:, 106:], 4, 2, 15).reshape(-1, 8)
    steps = _half(blocks[:, :2]) * (1 + 2 * scales.float())
    return steps.unsqueeze(2).unsqueeze(3) * rows * _own_signs(blocks[:, 74:106]).reshape(-1, 8, 4, 8)


_DELTA = 0.125


def _iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    high = _words(blocks[:, 34:])
    codes = blocks[:, 2:34].int() | (_of_each(high, 3, 4, 7).reshape(-1, 32) << 8)
    steps = _half(blocks[:, :2]) * (2 * ((high >> 12) & 7) + 1).float()
    delta = _DELTA - 2 * _DELTA * (high >> 15).float()
    rows = grid("IQ1_S")[codes.long()].reshape(-1, 8, 4, 8)
    return steps.unsqueeze(2).unsqueeze(3) * (rows + delta.unsqueeze(2).unsqueeze(3))


def _iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    packed, high = _words(blocks[:, 48:]), blocks[:, 32:48]
    nibbles = (packed >> 12) << torch.tensor([0, 4, 8, 12], dtype=torch.int32)  # the scale, in the upper bits of four words
    d = nibbles.sum(dim=1, dtype=torch.int32).to(torch.int16).view(torch.float16).float().unsqueeze(1)
    steps = d * (2 * _of_each(packed, 3, 4, 7).reshape(-1, 16) + 1).float()
    both = _of_each(high, 4, 2, 15).reshape(-1, 32).int()
    codes = blocks[:, :32].int() | ((both & 7) << 8)
    delta = (_DELTA - 2 * _DELTA * (both >> 3).float()).reshape(-1, 16, 2, 1)
    rows = grid("IQ1_S")[codes.long()].reshape(-1, 16, 2, 8)
    return steps.unsqueeze(2).unsqueeze(3) * (rows + delta)


_KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0, "MXFP4": _mxfp4, "NVFP4": _nvfp4, "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s, "IQ1_M": _iq1_m,
}  # fmt: skip
