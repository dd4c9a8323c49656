"""What the application's account of the database may do: read and write every table, but of audit records only add and
read them, and of the chain only move its head. It owns nothing, so it can neither drop a trigger nor change a table;
those are the owner's, who migrates and trims.
"""

from django.db import connection, transaction
from psycopg import sql

from kernel.refusals import Conflict, InvalidInput

_KNOWN = """
SELECT rolsuper, pg_has_role(rolname, relowner, 'MEMBER')
FROM pg_roles, pg_class WHERE rolname = %s AND pg_class.oid = 'audit_auditrecord'::regclass
"""
_GRANTS = (
    "GRANT USAGE ON SCHEMA public TO {role}",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}",
    "GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA public TO {role}",
    "REVOKE ALL ON audit_auditrecord, audit_auditchain, django_migrations FROM {role}",
    "GRANT SELECT, INSERT ON audit_auditrecord, audit_auditchain TO {role}",
    "GRANT UPDATE (head_number, head_digest) ON audit_auditchain TO {role}",
    "GRANT SELECT ON django_migrations TO {role}",
)


@transaction.atomic
def application_role_grant(*, role: str) -> None:
    """Give an existing role what the application needs, and no more. To be repeated after each migration.

    Raises:
        InvalidInput: there is no such role.
        Conflict: it is a superuser, or the owner of the tables or a member of it: grants would not bind it.
    """
    with connection.cursor() as cursor:
        cursor.execute(_KNOWN, [role])
        found = cursor.fetchone()
        if found is None:
            message = f"there is no role {role!r} in PostgreSQL; make it first: CREATE ROLE {role} LOGIN"
            raise InvalidInput(field="role", rule="exists", message=message)
        if any(found):
            raise Conflict(f"{role} is a superuser or owns the tables, so nothing binds it; name another role")
        for grant in _GRANTS:
            cursor.execute(sql.SQL(grant).format(role=sql.Identifier(role)))
