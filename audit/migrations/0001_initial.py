import django.contrib.postgres.indexes
from django.db import migrations, models


_APPEND_ONLY = """
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
"""PostgreSQL refuses to change audit records. The oldest may be deleted, in a transaction that says so
(audit.services)."""

_ROW_CAPTURE = """
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
"""For the triggers that record changed rows while a request or command is audited. `audit.row_capture` adds the triggers
to every table."""

_BY_HAND = [
    migrations.RunSQL(_APPEND_ONLY),
    migrations.RunSQL(_ROW_CAPTURE),
]
"""What `makemigrations` does not write."""


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='AuditChain',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('head_number', models.BigIntegerField(default=0)),
                ('head_digest', models.CharField(default='0000000000000000000000000000000000000000000000000000000000000000', max_length=64)),
                ('base_number', models.BigIntegerField(default=0)),
                ('base_digest', models.CharField(default='0000000000000000000000000000000000000000000000000000000000000000', max_length=64)),
            ],
        ),
        migrations.CreateModel(
            name='AuditExport',
            fields=[
                ('target', models.CharField(max_length=500, primary_key=True, serialize=False)),
                ('number', models.BigIntegerField(default=0)),
                ('at', models.DateTimeField()),
            ],
        ),
        migrations.CreateModel(
            name='CapturedRow',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('capture', models.CharField(db_index=True, max_length=32)),
                ('at', models.DateTimeField()),
                ('table_name', models.CharField(max_length=63)),
                ('operation', models.CharField(max_length=6)),
                ('key', models.JSONField()),
                ('columns', models.JSONField()),
            ],
        ),
        migrations.CreateModel(
            name='AuditRecord',
            fields=[
                ('number', models.BigIntegerField(primary_key=True, serialize=False)),
                ('at', models.DateTimeField(db_index=True)),
                ('outcome', models.CharField(choices=[('done', 'done'), ('denied', 'denied')], max_length=8)),
                ('actor', models.CharField(max_length=150)),
                ('proof', models.CharField(choices=[('session', 'session'), ('token', 'token'), ('join-token', 'join-token'), ('command', 'command')], max_length=16)),
                ('address', models.CharField(blank=True, max_length=64)),
                ('token_prefix', models.CharField(blank=True, max_length=16)),
                ('action', models.CharField(max_length=96)),
                ('object', models.CharField(blank=True, max_length=250)),
                ('about', models.JSONField(default=list)),
                ('reason', models.TextField(blank=True)),
                ('request_id', models.CharField(blank=True, max_length=64)),
                ('changes', models.TextField(default='{}')),
                ('previous', models.CharField(max_length=64)),
                ('digest', models.CharField(max_length=64)),
            ],
            options={
                'ordering': ['-number'],
                'indexes': [models.Index(fields=['actor', '-number'], name='audit_actor'), models.Index(fields=['action', '-number'], name='audit_action'), models.Index(fields=['request_id'], name='audit_request'), django.contrib.postgres.indexes.GinIndex(fields=['about'], name='audit_about', opclasses=['jsonb_path_ops'])],
            },
        ),
        *_BY_HAND,
    ]
