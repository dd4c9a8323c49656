"""PostgreSQL itself refuses to change records. Old ones may go, from the beginning of the chain only, in a transaction
that says so (audit.services.chain)."""

from django.db import migrations

GUARD = """
CREATE FUNCTION audit_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'TRUNCATE' AND current_setting('switchyard.audit_truncate', true) = 'on' THEN
        RETURN NULL;
    END IF;
    IF TG_OP = 'DELETE' AND current_setting('switchyard.audit_retention', true) = 'on'
       AND OLD.number <= (SELECT max(base_number) FROM audit_auditchain) THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'audit records are never changed: % refused', TG_OP USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER audit_record_stays BEFORE UPDATE OR DELETE ON audit_auditrecord
    FOR EACH ROW EXECUTE FUNCTION audit_guard();
CREATE TRIGGER audit_records_stay BEFORE TRUNCATE ON audit_auditrecord
    FOR EACH STATEMENT EXECUTE FUNCTION audit_guard();
"""
UNGUARD = """
DROP TRIGGER audit_record_stays ON audit_auditrecord;
DROP TRIGGER audit_records_stay ON audit_auditrecord;
DROP FUNCTION audit_guard();
"""


class Migration(migrations.Migration):
    dependencies = [("audit", "0001_initial")]
    operations = [migrations.RunSQL(GUARD, UNGUARD)]
