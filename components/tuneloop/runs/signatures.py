"""Signatures of a model's directory, by key or certificate, and their verification; docs/signing.md has the files. They
are made by model-signing, whose minor version is pinned: for the SLSA statement private parts of it are used."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tuneloop.core.errors import UserError

SIGNATURE, STATEMENT, CARD = "model.sig", "provenance.sigstore.json", "README.md"
BESIDE = {CARD, "LICENSE", STATEMENT}
"""Files that may be signed without being the model's."""
SIGNED, PROVENANCE = "https://model_signing/signature/v1.0", "https://slsa.dev/provenance/v1"


def open_signer(key: Path, certificates: Sequence[Path]) -> Any:
    """Return a signer with a private key and, if given, its certificate chain, the leaf first. All files are PEM."""
    with _refuse(
        "--key", key, "cannot sign: give a PEM file without password, of P-256, P-384 or P-521"
    ):
        from model_signing._signing import sign_certificate, sign_ec_key

        chain = certificates[1:] or certificates
        return (
            sign_certificate.Signer(key, certificates[0], chain)
            if certificates
            else sign_ec_key.Signer(key)
        )


def open_verifier(public_key: Path | None, authorities: Sequence[Path]) -> Any:
    """Return a verifier with a public key, or with the certificates of trusted authorities. All files are PEM."""
    if (public_key is None) == (not authorities):
        raise UserError(
            "--public-key", public_key and str(public_key), "give it or --certificate, not both"
        )
    with _refuse(
        "--public-key",
        public_key or [*map(str, authorities)],
        "cannot verify: give the signer's, as PEM",
    ):
        from model_signing._signing import sign_certificate, sign_ec_key

        return (
            sign_ec_key.Verifier(public_key)
            if public_key
            else sign_certificate.Verifier(authorities)
        )


def sign_model(
    directory: Path, files: Mapping[str, str], predicate: Mapping[str, Any], signer: Any
) -> None:
    """Write the statement `predicate` of these files (name → SHA-256), and then the signature of the directory."""
    from model_signing._signing.signing import Payload
    from model_signing._signing.signing import statement as in_toto

    subjects = [
        in_toto.ResourceDescriptor(name=name, digest={"sha256": each}).pb
        for name, each in files.items()
    ]
    statement = in_toto.Statement(subjects=subjects, predicate_type=PROVENANCE, predicate=predicate)
    signer.sign(SimpleNamespace(statement=statement)).write(directory / STATEMENT)
    signer.sign(Payload(_hash_directory(directory))).write(directory / SIGNATURE)


def verify_model(directory: Path, verifier: Any) -> dict[str, str]:
    """Prove a model's files against its signature and its statement; return what the statement says, for people. Raises
    UserError for a signature or statement that does not fit, and the first file that was changed, lost or added."""
    with _open_envelope(directory / SIGNATURE, SIGNED, verifier) as (signature, signer):
        signed = {each["name"]: each["digest"] for each in signature["predicate"]["resources"]}
    check_files(directory, signed, "its signature; get the model again from who signed it")
    with _open_envelope(directory / STATEMENT, PROVENANCE, verifier) as (statement, _):
        build, details = (
            statement["predicate"]["buildDefinition"],
            statement["predicate"]["runDetails"],
        )
        subjects = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
        for name in sorted({*subjects, *(signed.keys() - BESIDE)}):
            if subjects.get(name) != signed.get(name):
                raise ValueError(f"it describes another model: {name} has another digest")
        facts = {name: build["externalParameters"][name] for name in ("run", "version")}
        facts |= {
            "signed by": signer,
            "builder": details["builder"]["id"],
            "files": f"{len(signed)}, by SHA-256",
        }
        return {**facts, "root": f"sha256:{details['byproducts'][0]['digest']['tuneloopRoot']}"}


def check_files(
    directory: Path, wanted: Mapping[str, str], where: str, beside: bool = False
) -> None:
    """Raise UserError for links, and for the first file that is not `wanted` (name → SHA-256) or allowed `beside`."""
    with _refuse("DIR", directory, "cannot be read, or has links; put copies in their place"):
        found = {
            each.identifier: each.digest.digest_hex
            for each in _hash_directory(directory).resource_descriptors()
        }
    for name in sorted({*wanted, *found} - (BESIDE - {*wanted} if beside else set())):
        how = (
            "is missing from those in"
            if name not in found
            else "differs from"
            if name in wanted
            else "is not in"
        )
        if found.get(name) != wanted.get(name):
            raise UserError("file", f"{directory}/{name}", f"{how} {where}")


def _hash_directory(directory: Path) -> Any:
    from model_signing import (
        hashing,
    )  # it leaves out what git and its hosts have at the head of a directory

    return hashing.Config().set_ignored_paths(paths=[SIGNATURE]).hash(directory)


@contextmanager
def _open_envelope(path: Path, kind: str, verifier: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Verify a bundle's signature, then yield its statement and its signer; later failures are blamed on the bundle."""
    with _refuse(
        "file",
        path,
        "does not fit: give the key or authority of who signed it, or get the model again",
    ):
        from cryptography import x509
        from model_signing._signing import sign_sigstore_pb, signing

        bundle = sign_sigstore_pb.Signature.read(path)
        envelope, payload = verifier._verify_signed_content(bundle)
        statement = json.loads(payload)
        if (envelope, said := statement["predicateType"]) != (
            signing._IN_TOTO_JSON_PAYLOAD_TYPE,
            kind,
        ):
            raise ValueError(f"it states {said}, not {kind}")
        known = bundle.bundle.verification_material
        chain = known.x509_certificate_chain and known.x509_certificate_chain.certificates
        name = chain and x509.load_der_x509_certificate(chain[0].raw_bytes).subject.rfc4514_string()
        yield statement, name or f"the key of SHA-256 {known.public_key.hint}"


@contextmanager
def _refuse(field: str, value: object, why: str) -> Iterator[None]:
    """Raise UserError for whatever is raised inside: files may hold anything, and the library raises what it meets."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            "sign", error.name, "is not installed: pip install 'tuneloop[sign]'"
        ) from None
    except Exception as error:
        raise UserError(
            field, str(value), f"{why} ({str(error) or type(error).__name__})"
        ) from error
