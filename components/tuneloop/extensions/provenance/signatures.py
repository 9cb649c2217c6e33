"""Signatures of a model's directory, by key or certificate, and their verification;
docs/signing.md has the files.

They are made by model-signing, whose minor version is pinned: for the SLSA statement private
parts of it are used.

Verification needs no store and no run: `tuneloop verify-model` reads a directory alone.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tuneloop.core.errors import UserError

SIGNATURE = "model.sig"
STATEMENT = "provenance.sigstore.json"
CARD = "README.md"
"""Names of files beside the model's: an interface, as directories that are signed already have them
(docs/signing.md)."""
UNSTATED_FILES = {CARD, "LICENSE", STATEMENT}
"""Files that may be signed without being the model's. Any other file is refused by `attest`."""
SIGNATURE_TYPE = "https://model_signing/signature/v1.0"
PROVENANCE_TYPE = "https://slsa.dev/provenance/v1"
"""Types of the two statements that `verify_model` takes: model-signing's own, and SLSA's."""


def open_signer(key: Path, certificates: Sequence[Path]) -> Any:
    """Return a signer with a private key and, if given, its certificate chain, the leaf first.
    All files are PEM.
    """
    remedy = "cannot sign: give a PEM file without password, of P-256, P-384 or P-521"
    with _blame_errors_on("--key", key, remedy):
        from model_signing._signing import sign_certificate, sign_ec_key

        if not certificates:
            return sign_ec_key.Signer(key)
        # A certificate that signs itself is its own chain.
        chain = certificates[1:] or certificates
        return sign_certificate.Signer(key, certificates[0], chain)


def open_verifier(public_key: Path | None, authorities: Sequence[Path]) -> Any:
    """Return a verifier with a public key, or with the certificates of trusted authorities. All
    files are PEM.
    """
    if (public_key is None) == (not authorities):
        given_key = public_key and str(public_key)
        raise UserError("--public-key", given_key, "give it or --certificate, not both")
    value = public_key or [str(authority) for authority in authorities]
    remedy = "cannot verify: give the signer's, as PEM"
    with _blame_errors_on("--public-key", value, remedy):
        from model_signing._signing import sign_certificate, sign_ec_key

        if public_key:
            return sign_ec_key.Verifier(public_key)
        return sign_certificate.Verifier(authorities)


def sign_model(
    directory: Path,
    digests: Mapping[str, str],
    predicate: Mapping[str, Any],
    signer: Any,
) -> None:
    """Write the statement of a model's sources, and then the signature of the directory.

    Args:
        directory: the model's.
        digests: name → SHA-256 of the model's files.
        predicate: what is stated of them, as SLSA's provenance has it.
        signer: from `open_signer`.
    """
    from model_signing._signing.signing import Payload
    from model_signing._signing.signing import statement as in_toto

    subjects: list[Any] = []
    for name, digest in digests.items():
        subject = in_toto.ResourceDescriptor(name=name, digest={"sha256": digest})
        subjects.append(subject.pb)
    statement = in_toto.Statement(
        subjects=subjects,
        predicate_type=PROVENANCE_TYPE,
        predicate=predicate,
    )
    # The signer takes a payload with a statement; model-signing makes only payloads of its own
    # type.
    signer.sign(SimpleNamespace(statement=statement)).write(directory / STATEMENT)
    # The statement is among the files that the signature covers.
    signer.sign(Payload(_hash_directory(directory))).write(directory / SIGNATURE)


def verify_model(directory: Path, verifier: Any) -> dict[str, str]:
    """Prove a model's files against its signature and its statement.

    Returns:
        What the statement says, name → text, for people.

    Raises:
        UserError: the signature or the statement does not fit, or a file was changed, lost or
            added; the first one is named.
    """
    with _open_envelope(directory / SIGNATURE, SIGNATURE_TYPE, verifier) as (signature, signer):
        resources = signature["predicate"]["resources"]
        signed = {resource["name"]: resource["digest"] for resource in resources}
    check_files(directory, signed, "its signature; get the model again from who signed it")
    with _open_envelope(directory / STATEMENT, PROVENANCE_TYPE, verifier) as (statement, _):
        _check_subjects(statement["subject"], signed)
        parameters = statement["predicate"]["buildDefinition"]["externalParameters"]
        details = statement["predicate"]["runDetails"]
        return {
            "run": parameters["run"],
            "version": parameters["version"],
            "signed by": signer,
            "builder": details["builder"]["id"],
            "files": f"{len(signed)}, by SHA-256",
            "root": f"sha256:{details['byproducts'][0]['digest']['tuneloopRoot']}",
        }


def _check_subjects(
    subjects: Sequence[Mapping[str, Any]],
    signed: Mapping[str, str],
) -> None:
    """Raise ValueError unless a statement is about the files that are signed (name → SHA-256)."""
    stated = {subject["name"]: subject["digest"]["sha256"] for subject in subjects}
    for name in sorted(stated.keys() | (signed.keys() - UNSTATED_FILES)):
        if stated.get(name) != signed.get(name):
            raise ValueError(f"it describes another model: {name} has another digest")


def check_files(
    directory: Path,
    digests: Mapping[str, str],
    source: str,
    *,
    allow_unstated: bool = False,
) -> None:
    """Check that a directory has the files of a model and no others.

    Args:
        directory: the model's.
        digests: name → SHA-256 of the files that it has to have.
        source: where these are from, and a remedy, for the message.
        allow_unstated: whether it may have files that are not the model's (`UNSTATED_FILES`).

    Raises:
        UserError: there are links, or a file is missing, different or not expected.
    """
    remedy = "cannot be read, or has links; put copies in their place"
    with _blame_errors_on("DIR", directory, remedy):
        resources = _hash_directory(directory).resource_descriptors()
        actual = {resource.identifier: resource.digest.digest_hex for resource in resources}
    names = digests.keys() | actual.keys()
    if allow_unstated:
        names -= UNSTATED_FILES - digests.keys()
    for name in sorted(names):
        if actual.get(name) == digests.get(name):
            continue
        if name not in actual:
            problem = "is missing from those in"
        elif name in digests:
            problem = "differs from"
        else:
            problem = "is not in"
        raise UserError("file", f"{directory}/{name}", f"{problem} {source}")


def _hash_directory(directory: Path) -> Any:
    """Return model-signing's manifest of all files but the signature. The library itself leaves out
    the files of git and of its hosts, such as ``.github``.
    """
    from model_signing import hashing

    config = hashing.Config().set_ignored_paths(paths=[SIGNATURE])
    return config.hash(directory)


@contextmanager
def _open_envelope(
    path: Path,
    kind: str,
    verifier: Any,
) -> Iterator[tuple[dict[str, Any], str]]:
    """Verify a bundle's signature, then yield its statement and its signer; later failures are
    blamed on the bundle.
    """
    remedy = "does not fit: give the key or authority of who signed it, or get the model again"
    with _blame_errors_on("file", path, remedy):
        from cryptography import x509
        from model_signing._signing import sign_sigstore_pb, signing

        bundle = sign_sigstore_pb.Signature.read(path)
        payload_type, payload = verifier._verify_signed_content(bundle)
        statement = json.loads(payload)
        stated_type = statement["predicateType"]
        # A signed statement of another type may name anything.
        if payload_type != signing._IN_TOTO_JSON_PAYLOAD_TYPE or stated_type != kind:
            raise ValueError(f"it states {stated_type}, not {kind}")
        material = bundle.bundle.verification_material
        # Who signed with a certificate has a name; of a bare key only the digest is known.
        chain = material.x509_certificate_chain
        if chain and chain.certificates:
            certificate = x509.load_der_x509_certificate(chain.certificates[0].raw_bytes)
            signer = certificate.subject.rfc4514_string()
        else:
            signer = ""
        yield statement, signer or f"the key of SHA-256 {material.public_key.hint}"


@contextmanager
def _blame_errors_on(field: str, value: object, remedy: str) -> Iterator[None]:
    """Raise UserError for whatever is raised inside: files may hold anything, and the library
    raises what it meets.
    """
    try:
        yield
    except ImportError as error:
        problem = "is not installed: pip install 'tuneloop[sign]'"
        raise UserError("sign", error.name, problem) from None
    except Exception as error:
        cause = str(error) or type(error).__name__
        raise UserError(field, str(value), f"{remedy} ({cause})") from error
