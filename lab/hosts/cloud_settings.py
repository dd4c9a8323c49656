"""What the process of a laboratory's cloud is told by who starts it, who has none of the packages that it needs."""

from dataclasses import dataclass

PORT = 5000


@dataclass(frozen=True, slots=True)
class Settings:
    """`access_key`, `secret`: of the control plane. `pending_s`: how long an instance is pending. `address`: of the
    host at which the cloud answers."""

    access_key: str
    secret: str
    pending_s: float
    address: str = ""

    @property
    def url(self) -> str:
        return f"http://{self.address}:{PORT}"
