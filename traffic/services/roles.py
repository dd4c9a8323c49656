"""Runs the planner of roles: looks at every place whose roles are planned, and has the fleet apply what is decided."""

from datetime import datetime

from fleet.planning.roles.ratio import plan_ratio
from fleet.services.role import RoleLook, role_apply
from kernel.leases import lease_release, lease_take, this_holder
from traffic.selectors.roles import planned_places

LEASE = "role-planner"
PASS_LIMIT_S = 20.0


def roles_plan(*, now: datetime) -> list[str]:
    """One pass. Returns the deployments whose cells change their roles; nothing while another controller is at it."""
    holder = this_holder()
    if lease_take(name=LEASE, holder=holder, ttl_s=PASS_LIMIT_S, now=now) is None:
        return []
    try:
        looks = [
            RoleLook(one.row, one.acting, plan_ratio(one.view), one.figures, one.counted) for one in planned_places(now)
        ]
        return sorted(
            {look.place.deployment_id for look in looks if role_apply(look=look, now=now) and look.sets_roles}
        )
    finally:
        lease_release(name=LEASE, holder=holder, now=now)
