"""What an engine can do, as settings, graphs and pods have to know it.

The module of each engine in `tuneloop.inference.engines` states it as ``CAPABILITIES``. Ask these
flags and do not compare the name of an engine: another engine may have the same abilities.
"""

from dataclasses import dataclass

from tuneloop.core import plugins


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do. The defaults describe an engine that samples in the stage's process.

    Attributes:
        in_process: it computes in the process of the stage, where no endpoint is given. The servers
            of any other engine are the user's, and a stage that samples with it needs no device.
        serves: a run starts servers for it (`tuneloop.inference.server`), whose endpoint its stages
            are given.
        pulls: its servers can follow published versions of the weights, and pull them.
        sleeps: its servers can give back the memory of their devices between two rollouts.
        deterministic: it can give the same bits in every run: always, or where it is asked to.
        replicas: a run can divide its prompts among several of its servers.
    """

    in_process: bool = True
    serves: bool = False
    pulls: bool = False
    sleeps: bool = False
    deterministic: bool = False
    replicas: bool = False


def find_capabilities(kind: str) -> Capabilities:
    """Find the capabilities of the engine `kind`, which is a setting's ``engine.kind``.

    An engine of a third party counts as one with the defaults: only the image of its stages needs
    to have it, so it cannot be asked where a run is configured.

    Raises:
        AttributeError: an engine that ships with tuneloop states none.
    """
    if kind not in plugins.list_shipped_variants("engines"):
        return Capabilities()
    capabilities: Capabilities = plugins.load_variant("engines", kind, "CAPABILITIES")
    return capabilities
