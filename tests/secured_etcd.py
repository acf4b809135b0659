"""An etcd with users, on loopback."""

from __future__ import annotations

from typing import Any

from clusters import PATIENCE_S, Member
from waiting import wait_for

from agent.errors import StoreRefused, StoreUnavailable
from agent.store import connections, etcd_protocol
from agent.store.api import KeyRange
from agent.store.etcd import EtcdStore
from agent.store.etcd_protocol import message

HOME = "/elastic-agent/mine/"
SECRET = "correct horse"  # noqa: S105 - of a test's own etcd
QUICK = ("--bcrypt-cost", "4")


class SecuredEtcd:
    """An etcd with users, and its administrator."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self._link = connections.EtcdConnection(member.endpoint)
        self._auth: Any = self._link.auth
        self._metadata: tuple[tuple[str, str], ...] = ()
        wait_for(lambda: is_answering(member), "etcd serves")
        self._ask("UserAdd", message("AuthUserAddRequest")(name="root", password="root"))
        self._ask("RoleAdd", message("AuthRoleAddRequest")(name="root"))
        self._ask("UserGrantRole", message("AuthUserGrantRoleRequest")(user="root", role="root"))
        self._ask("UserAdd", message("AuthUserAddRequest")(name="train", password=SECRET))
        self._ask("RoleAdd", message("AuthRoleAddRequest")(name="train"))
        self.permit(HOME)
        self._ask("UserGrantRole", message("AuthUserGrantRoleRequest")(user="train", role="train"))
        self._ask("AuthEnable", message("AuthEnableRequest")())

    def permit(self, prefix: str) -> None:
        """Let the user read and write all keys that begin with this."""
        kind = message("Permission", "authpb")
        permission = kind(
            permType=kind.READWRITE, key=prefix.encode(), range_end=etcd_protocol.prefix_end(prefix.encode())
        )
        self._ask("RoleGrantPermission", message("AuthRoleGrantPermissionRequest")(name="train", perm=permission))

    def forbid(self, prefix: str) -> None:
        self._ask(
            "RoleRevokePermission",
            message("AuthRoleRevokePermissionRequest")(
                role="train", key=prefix.encode(), range_end=etcd_protocol.prefix_end(prefix.encode())
            ),
        )

    def change_password(self, password: str) -> None:
        self._ask("UserChangePassword", message("AuthUserChangePasswordRequest")(name="train", password=password))

    def log_in(self) -> None:
        """The administrator needs a token of its own once users are enabled, and after each restart."""
        reply = self._auth.Authenticate(etcd_protocol.authenticate_request("root", "root"), timeout=PATIENCE_S)
        self._metadata = (("token", reply.token),)

    def keys(self, prefix: str) -> list[str]:
        """What is there, as the administrator sees it."""
        request = etcd_protocol.read_request([KeyRange(prefix, is_prefix=True)], prefix)
        reply = self._link.kv.Txn(request, timeout=PATIENCE_S, metadata=self._metadata)
        return [item.key for item in etcd_protocol.items_of(reply)]

    def restart(self) -> None:
        self.member.restart()
        wait_for(lambda: is_answering(self.member), "etcd serves again")

    def close(self) -> None:
        self._link.channel.close()

    def _ask(self, what: str, request: Any) -> None:  # noqa: ANN401 - a message without a type
        getattr(self._auth, what)(request, timeout=PATIENCE_S, metadata=self._metadata)


def is_answering(member: Member) -> bool:
    store = EtcdStore([member.endpoint], retry_for_s=0.5)
    try:
        store.read([])
    except StoreRefused:
        pass
    except StoreUnavailable:
        return False
    finally:
        store.close()
    return True
