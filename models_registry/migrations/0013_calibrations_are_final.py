"""PostgreSQL itself refuses to change a calibration: what was measured stays, and the newest counts."""

from django.db import migrations

FINAL = """
CREATE FUNCTION calibration_is_final() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a calibration is never changed; store another, the newest counts';
END $$;
CREATE TRIGGER calibration_final BEFORE UPDATE ON models_registry_speculationcalibration
FOR EACH ROW EXECUTE FUNCTION calibration_is_final();
"""


class Migration(migrations.Migration):
    dependencies = [("models_registry", "0012_by_type")]
    operations = [migrations.RunSQL(FINAL, "DROP FUNCTION IF EXISTS calibration_is_final() CASCADE;")]
