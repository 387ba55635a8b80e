"""The secret of a job: with it, ranks prove that they and their messages belong to the job. Importing needs no torch.

Torch authenticates neither its TCP stores nor the sockets of gloo and NCCL, so another user of the machine, or of the
network, can connect to them. The launchers of this package create a secret for each job. Under torchrun or SLURM, the
user sets the environment variable `SECRET`. Without it the key is empty, and nothing is proven.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

from lightning_cp.errors import JobSecretError

SECRET = "LIGHTNING_CP_SECRET"  # environment variable of the ranks
_BYTES = hashlib.sha256().digest_size
_FIX = f"set {SECRET} to the same value for all ranks, or for none"


def new_secret() -> str:
    """Create the secret of a job."""
    return secrets.token_hex(_BYTES)


def signed(data: bytes, purpose: str) -> bytes:
    """Return `data` behind its HMAC. Args: purpose: name and number of the message, so that no other replaces it."""
    return _mac(purpose, data) + data


def verified(message: bytes, purpose: str) -> bytes:
    """Return the data of a `signed` message.

    Raises: JobSecretError: the sender does not know the secret, or the message was signed for another purpose.
    """
    mac, data = message[:_BYTES], message[_BYTES:]
    if not hmac.compare_digest(mac, _mac(purpose, data)):
        raise JobSecretError(
            f"a message ({purpose}) was not sent by a rank of this job: another process has joined the job, or "
            f"{SECRET} differs between ranks; {_FIX}"
        )
    return data


def check_members(device: str) -> None:
    """Let all ranks prove to each other that they know the secret: each signs the random numbers of all ranks.

    Args: device: type of the device on which the world can exchange tensors, cpu or cuda.
    Ranks: the whole world.
    Raises: JobSecretError: on every rank, if a rank does not know the secret.
    """
    challenges = b"".join(_gather(secrets.token_bytes(_BYTES), device))
    import torch.distributed as dist

    proofs = _gather(_mac(f"rank {dist.get_rank()}", challenges), device)
    strangers = [
        rank for rank, proof in enumerate(proofs) if not hmac.compare_digest(proof, _mac(f"rank {rank}", challenges))
    ]
    if strangers:
        raise JobSecretError(
            f"ranks {strangers} do not know the secret of rank {dist.get_rank()}: another process has taken a place in "
            f"this job, or {SECRET} differs between ranks; {_FIX}"
        )


def _mac(purpose: str, data: bytes) -> bytes:
    name = purpose.encode()
    return hmac.digest(os.environ.get(SECRET, "").encode(), len(name).to_bytes(8) + name + data, "sha256")


def _gather(data: bytes, device: str) -> list[bytes]:
    """All-gather `_BYTES` bytes of each rank, without pickle."""
    import torch
    import torch.distributed as dist

    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return [bytes(x.tolist()) for x in gathered]
