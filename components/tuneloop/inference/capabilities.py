"""What an engine can do, as settings, graphs and pods have to know it.

The module of each engine in `tuneloop.inference.engines` states it as ``CAPABILITIES``. Ask these
flags and do not compare the name of an engine: another engine may have the same abilities. What
else the servers of an engine can do, the class of its settings says (`tuneloop.config.engines`): it
has a key for each ability. `config/engines.py` refuses an engine whose class and flags do not
agree.

Readers: the settings (`config/engines.py`, `config/followed.py`, `config/choices.py`), the graphs
(`argo/loop.py`, `argo/template.py`), and `argo/pod_fields.py` for the pod's device.
"""

from dataclasses import dataclass

from tuneloop.core import plugins


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do. The defaults describe an engine that samples in the stage's process.

    Attributes:
        in_process: it computes in the process of the stage, where no endpoint is given. The servers
            of any other engine are the user's, and a stage that samples with it needs no device.
        serves: a run can start servers for it, whose endpoint its stages are given. Its module has
            ``open_served_engine`` (`tuneloop.inference.served`), and its settings are a
            `tuneloop.config.engines.ServingEngine`.
    """

    in_process: bool = True
    serves: bool = False


def find_capabilities(kind: str) -> Capabilities:
    """Find the capabilities of the engine `kind`, which is a setting's ``engine.kind``.

    An engine of a third party counts as one with the defaults, unless its entry point names a whole
    module that states them. The code of any other need not be installed here, only in the image of
    its stages.

    Raises:
        UserError: the module of a third party's engine cannot be imported.
    """
    module = plugins.find_module("engines", kind)
    if module is None:
        return Capabilities()
    # Engines that ship state them all; a third party's module may have `open_engine` alone.
    capabilities: Capabilities = getattr(module, "CAPABILITIES", Capabilities())
    return capabilities
