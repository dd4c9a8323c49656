"""A table and a function for the triggers that note changed rows while a request or command is audited
(audit.row_capture, which also puts the triggers on every table)."""

from django.db import migrations, models

FUNCTION = """
ALTER TABLE audit_capturedrow SET UNLOGGED;
ALTER TABLE audit_capturedrow ALTER COLUMN at SET DEFAULT clock_timestamp();
CREATE FUNCTION audit_capture_row() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    old_row jsonb := CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) END;
    new_row jsonb := CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) END;
    told jsonb := '{}';
BEGIN
    IF TG_OP = 'UPDATE' THEN
        SELECT jsonb_object_agg(was.key, jsonb_build_array(was.value, new_row -> was.key)) INTO told
        FROM jsonb_each(old_row) AS was WHERE was.value IS DISTINCT FROM new_row -> was.key;
        IF told IS NULL THEN
            RETURN NULL;
        END IF;
    ELSIF TG_OP = 'DELETE' THEN
        told := old_row;
    ELSIF TG_TABLE_NAME = 'kernel_event' THEN
        told := new_row;
    END IF;
    INSERT INTO audit_capturedrow (capture, table_name, operation, key, columns)
    VALUES (current_setting('switchyard.audit_capture'), TG_TABLE_NAME, lower(TG_OP),
            COALESCE(new_row, old_row) -> TG_ARGV[0], told);
    RETURN NULL;
END $$;
"""
NO_FUNCTION = "DROP FUNCTION audit_capture_row() CASCADE;"


class Migration(migrations.Migration):
    dependencies = [("audit", "0002_append_only")]
    operations = [
        migrations.CreateModel(
            name="CapturedRow",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("capture", models.CharField(db_index=True, max_length=32)),
                ("at", models.DateTimeField()),
                ("table_name", models.CharField(max_length=63)),
                ("operation", models.CharField(max_length=6)),
                ("key", models.JSONField()),
                ("columns", models.JSONField()),
            ],
        ),
        migrations.RunSQL(FUNCTION, NO_FUNCTION),
    ]
