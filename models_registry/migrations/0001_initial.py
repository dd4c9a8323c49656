import django.core.validators
import django.db.models.deletion
import models_registry.instance_types.models
from django.db import migrations, models

from kernel.change_triggers import RecordChanges

_BENCHMARKS_ARE_FINAL = """
CREATE FUNCTION benchmark_is_final() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'what was measured is never changed; measure again';
END $$;
CREATE TRIGGER benchmark_point_final BEFORE UPDATE ON models_registry_benchmarkpoint
FOR EACH ROW EXECUTE FUNCTION benchmark_is_final();
CREATE TRIGGER benchmark_final BEFORE UPDATE ON models_registry_benchmark
FOR EACH ROW WHEN (OLD.ended_at IS NOT NULL) EXECUTE FUNCTION benchmark_is_final();
"""
"""PostgreSQL refuses to change a finished benchmark."""

_CALIBRATIONS_ARE_FINAL = """
CREATE FUNCTION calibration_is_final() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a calibration is never changed; store another, the newest counts';
END $$;
CREATE TRIGGER calibration_final BEFORE UPDATE ON models_registry_speculationcalibration
FOR EACH ROW EXECUTE FUNCTION calibration_is_final();
"""
"""PostgreSQL refuses to change a calibration; the newest row counts."""

_BY_HAND = [
    migrations.RunSQL(_BENCHMARKS_ARE_FINAL),
    migrations.RunSQL(_CALIBRATIONS_ARE_FINAL),
    RecordChanges(table="models_registry_instancetype", kind="instance-type", thing="name", key="{row}.name"),
    RecordChanges(table="models_registry_model", kind="model", thing="name", key="{row}.name"),
    RecordChanges(table="models_registry_modelversion", kind="model", thing="model_id", key="{row}.model_id"),
    RecordChanges(table="models_registry_modelversion", kind="model-version", thing="id", key="{row}.model_id || '@' || {row}.version"),
    RecordChanges(table="models_registry_validation", kind="model-version", thing="version_id"),
    RecordChanges(table="models_registry_benchmark", kind="benchmark", thing="id", key="{row}.id::text", columns=["state", "reason", "goodput"]),
    RecordChanges(table="models_registry_benchmarkpoint", kind="benchmark", thing="benchmark_id", only_new=True),
    RecordChanges(table="models_registry_configurationsearch", kind="configuration-search", thing="id", key="{row}.id::text", columns=["state", "reason", "found"]),
    RecordChanges(table="models_registry_modelimport", kind="model-import", thing="id", key="{row}.id::text", columns=["state", "reason", "files_done"]),
]
"""What `makemigrations` does not write."""


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('kernel', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='InstanceType',
            fields=[
                ('name', models.CharField(max_length=64, primary_key=True, serialize=False, validators=[django.core.validators.RegexValidator('^[A-Za-z0-9][-A-Za-z0-9._]*\\Z')])),
                ('accelerator', models.CharField(help_text='As the shipped types name it, such as `h100`; `cpu` or `none` without accelerators.', max_length=64)),
                ('chips', models.PositiveIntegerField(default=0, help_text='Number of accelerators.', validators=[django.core.validators.MaxValueValidator(1024)])),
                ('cores', models.PositiveIntegerField(default=0, help_text='Units that run one rank each: GPUs, or logical NeuronCores. Default: one for each accelerator.', validators=[django.core.validators.MaxValueValidator(1000000)])),
                ('memory_gib', models.FloatField(default=0, help_text='Memory of all accelerators, or of the host without accelerators.', validators=[models_registry.instance_types.models.validate_finite, django.core.validators.MinValueValidator(0), django.core.validators.MaxValueValidator(1000000)])),
                ('price_per_hour', models.FloatField(default=0, help_text='US dollars on demand; 0: unknown. Rates take precedence.', validators=[models_registry.instance_types.models.validate_finite, django.core.validators.MinValueValidator(0), django.core.validators.MaxValueValidator(1000000)])),
                ('watts', models.FloatField(default=0, help_text='Maximum power of the whole machine; 0: unknown.', validators=[models_registry.instance_types.models.validate_finite, django.core.validators.MinValueValidator(0), django.core.validators.MaxValueValidator(1000000)])),
                ('tensor_parallel_degree', models.PositiveIntegerField(default=1, help_text='Degree of versions that state none, for each machine. Default: one rank on every core.', validators=[models_registry.instance_types.models.validate_finite, django.core.validators.MinValueValidator(1), django.core.validators.MaxValueValidator(1000000)])),
                ('vendor', models.CharField(blank=True, choices=[('', ''), ('nvidia', 'nvidia'), ('neuron', 'neuron'), ('none', 'none')], default='', help_text='Maker of the accelerators. Default: as of shipped types with the same accelerator.', max_length=16)),
                ('arch', models.CharField(blank=True, default='', help_text='Compute capability, or version of the NeuronCores.', max_length=16)),
                ('lnc', models.PositiveIntegerField(default=1, help_text='Physical NeuronCores in a logical one.', validators=[models_registry.instance_types.models.validate_finite, django.core.validators.MinValueValidator(1), django.core.validators.MaxValueValidator(8)])),
                ('device_fraction', models.FloatField(default=1, help_text='Part of an accelerator that the machine has, if below 1.', validators=[models_registry.instance_types.models.validate_finite, django.core.validators.MinValueValidator(0.01), django.core.validators.MaxValueValidator(1)])),
                ('chip_watts', models.FloatField(default=0, help_text='Maximum power of one accelerator; 0: unknown.', validators=[models_registry.instance_types.models.validate_finite, django.core.validators.MinValueValidator(0), django.core.validators.MaxValueValidator(1000000)])),
                ('cpu_arch', models.CharField(blank=True, choices=[('', ''), ('x86_64', 'x86_64'), ('arm64', 'arm64')], default='', help_text="Architecture of the host's processor; empty: any.", max_length=16)),
                ('vcpus', models.PositiveIntegerField(blank=True, null=True, validators=[django.core.validators.MaxValueValidator(1000000)])),
                ('host_memory_gib', models.FloatField(blank=True, help_text='Memory of the host.', null=True, validators=[models_registry.instance_types.models.validate_finite, django.core.validators.MinValueValidator(0), django.core.validators.MaxValueValidator(1000000)])),
                ('network_cards', models.PositiveIntegerField(blank=True, null=True, validators=[django.core.validators.MaxValueValidator(1024)])),
                ('efa_interfaces', models.PositiveIntegerField(blank=True, help_text='Network cards that support EFA.', null=True, validators=[django.core.validators.MaxValueValidator(1024)])),
                ('network_gbps', models.FloatField(blank=True, help_text='Bandwidth of all network cards, in gigabits a second.', null=True, validators=[models_registry.instance_types.models.validate_finite, django.core.validators.MinValueValidator(0), django.core.validators.MaxValueValidator(1000000)])),
                ('local_nvme_gb', models.PositiveIntegerField(blank=True, help_text='Local NVMe storage in gigabytes.', null=True, validators=[django.core.validators.MaxValueValidator(1000000)])),
                ('interconnect', models.CharField(blank=True, default='', help_text='Link between accelerators, such as `nvswitch`.', max_length=32)),
                ('interconnect_gb_s', models.FloatField(blank=True, help_text='Its bandwidth for each accelerator, both directions, in gigabytes a second.', null=True, validators=[models_registry.instance_types.models.validate_finite, django.core.validators.MinValueValidator(0), django.core.validators.MaxValueValidator(1000000)])),
                ('notes', models.CharField(blank=True, default='', max_length=500)),
                ('sources', models.CharField(blank=True, default='', help_text='Where the values were read.', max_length=500)),
                ('origin', models.CharField(choices=[('shipped', 'Shipped'), ('operator', 'Operator'), ('found', 'Found')], default='operator', help_text='`shipped` with the product, stated by an `operator`, or `found` by an agent on a machine.', max_length=16)),
                ('changed_by', models.CharField(blank=True, default='', max_length=64)),
                ('changed_at', models.DateTimeField(blank=True, null=True)),
            ],
            options={
                'ordering': ['name'],
            },
        ),
        migrations.CreateModel(
            name='Model',
            fields=[
                ('name', models.SlugField(max_length=96, primary_key=True, serialize=False)),
                ('description', models.TextField(blank=True)),
                ('created_at', models.DateTimeField()),
            ],
            options={
                'ordering': ['name'],
            },
        ),
        migrations.CreateModel(
            name='ModelImport',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('source', models.CharField(help_text='`hf://ORG/NAME@REVISION` or `modelscope://ORG/NAME@REVISION`. Default: main branch.', max_length=330)),
                ('pattern', models.CharField(blank=True, default='', help_text='Glob for the weights, such as `*Q4_K_M.gguf`. Default: safetensors, or the only GGUF.', max_length=200)),
                ('draft', models.CharField(blank=True, default='', help_text='`model@version` to draft from it, once it is done.', max_length=161)),
                ('engine', models.CharField(blank=True, default='', help_text='Engine of the draft. Default: llama-cpp for a GGUF, else vllm.', max_length=32)),
                ('state', models.CharField(choices=[('queued', 'Queued'), ('running', 'Running'), ('done', 'Done'), ('failed', 'Failed'), ('cancelled', 'Cancelled')], default='queued', help_text='State of the import.', max_length=16)),
                ('reason', models.TextField(blank=True, help_text='Progress, or why it ended.')),
                ('revision', models.CharField(blank=True, help_text='Commit that REVISION named at the start.', max_length=128)),
                ('license', models.CharField(blank=True, help_text='Licence that the repository states.', max_length=64)),
                ('tags', models.JSONField(blank=True, default=list, help_text='Tags of the repository.')),
                ('configuration', models.JSONField(blank=True, default=dict, help_text='Numbers from `config.json`.')),
                ('artifact_uri', models.CharField(blank=True, help_text='Where the artifact is, once it is done.', max_length=512)),
                ('artifact_digest', models.CharField(blank=True, help_text='Digest of the artifact.', max_length=80)),
                ('files_total', models.PositiveIntegerField(default=0, help_text='Files to fetch.')),
                ('files_done', models.PositiveIntegerField(default=0, help_text='Files that were verified and stored.')),
                ('bytes_total', models.BigIntegerField(default=0, help_text='Bytes to fetch.')),
                ('bytes_done', models.BigIntegerField(default=0, help_text='Bytes fetched.')),
                ('bytes_per_s', models.FloatField(default=0, help_text='Present rate.')),
                ('troubles', models.PositiveIntegerField(default=0)),
                ('fence', models.PositiveIntegerField(default=0)),
                ('is_staged', models.BooleanField(default=False)),
                ('actor', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField()),
                ('due_at', models.DateTimeField()),
                ('ended_at', models.DateTimeField(null=True)),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(condition=models.Q(('state__in', ['queued', 'running'])), fields=['due_at'], name='import_due')],
            },
        ),
        migrations.CreateModel(
            name='ImportFile',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('path', models.CharField(max_length=1024)),
                ('size', models.BigIntegerField()),
                ('sha256', models.CharField(blank=True, max_length=64)),
                ('blob', models.CharField(blank=True, max_length=64)),
                ('revision', models.CharField(blank=True, max_length=64)),
                ('stored', models.CharField(blank=True, max_length=64)),
                ('model_import', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='files', to='models_registry.modelimport')),
            ],
            options={
                'ordering': ['model_import_id', 'path'],
                'constraints': [models.UniqueConstraint(fields=('model_import', 'path'), name='import_file_once')],
            },
        ),
        migrations.CreateModel(
            name='EngineAllowance',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('engine', models.CharField(max_length=32)),
                ('name', models.CharField(max_length=128)),
                ('why', models.CharField(max_length=200)),
                ('actor', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField()),
            ],
            options={
                'ordering': ['engine', 'name'],
                'constraints': [models.UniqueConstraint(fields=('engine', 'name'), name='engine_allowance_once')],
            },
        ),
        migrations.CreateModel(
            name='EngineBuild',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(help_text='Name that versions state, such as `vllm-0.32.0-cpu`.', max_length=64, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9._-]{0,63}$', 'lower-case letters, digits, `.`, `_` and `-`; 64 at most')])),
                ('uri', models.CharField(help_text="`file:///folder` on the control plane's hosts, `s3://bucket/prefix`, or `external://neuron-2.29` for the environment of that Neuron SDK in machines' images.", max_length=512)),
                ('digest', models.CharField(blank=True, help_text='`sha256:` and the digest of its manifest; if empty, it is read there.', max_length=80)),
                ('serves', models.CharField(help_text='Engine that it provides: `vllm`, or `generic/NAME`.', max_length=64)),
                ('version', models.CharField(help_text='Version of the engine.', max_length=64)),
                ('platform', models.CharField(help_text='Its target, such as `cpu-avx2` or `cuda13.0`.', max_length=64)),
                ('program', models.CharField(help_text='Program in it that is started.', max_length=128)),
                ('python', models.CharField(help_text='Version of the Python in it.', max_length=32)),
                ('cpu_arch', models.CharField(help_text='Processor architecture: `x86_64` or `aarch64`.', max_length=16)),
                ('cpu_flags', models.JSONField(blank=True, default=list, help_text='Processor features that a host must have.')),
                ('least_glibc', models.CharField(help_text='Oldest glibc of a host.', max_length=16)),
                ('least_driver', models.CharField(blank=True, help_text='Oldest NVIDIA driver of a host; empty: none is needed.', max_length=16)),
                ('packed_bytes', models.BigIntegerField(help_text='Bytes that an agent fetches.')),
                ('unpacked_bytes', models.BigIntegerField(help_text='Bytes on a node.')),
                ('parts', models.PositiveIntegerField(help_text='Files that its archive is cut into.')),
                ('actor', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField()),
            ],
            options={
                'ordering': ['name'],
            },
        ),
        migrations.CreateModel(
            name='EngineBuildUpload',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(help_text='Name of the build, once it is complete.', max_length=64, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9._-]{0,63}$', 'lower-case letters, digits, `.`, `_` and `-`; 64 at most')])),
                ('digest', models.CharField(help_text='Digest that the complete build will have.', max_length=80, unique=True)),
                ('facts', models.TextField(help_text='Text of its `build.json`.', max_length=65536)),
                ('digests', models.JSONField(default=list, help_text='SHA-256 of each part in hexadecimal, in order.')),
                ('parts', models.PositiveIntegerField(help_text='Parts of its archive.')),
                ('parts_done', models.PositiveIntegerField(default=0, help_text='Parts that were verified and stored.')),
                ('packed_bytes', models.BigIntegerField(help_text='Bytes of all parts.')),
                ('bytes_done', models.BigIntegerField(default=0, help_text='Bytes that were verified and stored.')),
                ('walk', models.JSONField(default=dict)),
                ('actor', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField()),
                ('touched_at', models.DateTimeField(help_text='When the latest part was stored.')),
            ],
            options={
                'ordering': ['name'],
            },
        ),
        migrations.CreateModel(
            name='CheckpointRecord',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('uri', models.CharField(max_length=512)),
                ('digest', models.CharField(max_length=80)),
                ('facts', models.JSONField(blank=True, default=dict)),
                ('problem', models.TextField(blank=True)),
                ('read_at', models.DateTimeField()),
            ],
            options={
                'ordering': ['-id'],
                'constraints': [models.UniqueConstraint(fields=('uri', 'digest'), name='checkpoint_once_per_artifact')],
            },
        ),
        migrations.CreateModel(
            name='ModelVersion',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version', models.CharField(max_length=64)),
                ('state', models.CharField(choices=[('draft', 'Draft'), ('validated', 'Validated'), ('released', 'Released'), ('retired', 'Retired')], default='draft', max_length=16)),
                ('reason', models.TextField(blank=True)),
                ('engine', models.CharField(max_length=32)),
                ('engine_build', models.CharField(blank=True, max_length=64)),
                ('artifact_uri', models.CharField(blank=True, max_length=512)),
                ('artifact_digest', models.CharField(blank=True, max_length=80)),
                ('context_length', models.PositiveIntegerField(default=2048)),
                ('max_concurrency', models.PositiveIntegerField(default=16)),
                ('ready_timeout_s', models.FloatField(default=300.0)),
                ('parallelism', models.JSONField(default=dict)),
                ('engine_options', models.JSONField(blank=True, default=dict)),
                ('engine_env', models.JSONField(blank=True, default=dict)),
                ('golden_prompts', models.JSONField(blank=True, default=list)),
                ('golden_waiver', models.TextField(blank=True)),
                ('attention_heads', models.PositiveIntegerField(blank=True, null=True)),
                ('kv_heads', models.PositiveIntegerField(blank=True, null=True)),
                ('layers', models.PositiveIntegerField(blank=True, null=True)),
                ('speculation', models.JSONField(blank=True, default=dict)),
                ('quantization', models.JSONField(blank=True, default=dict)),
                ('adapters', models.JSONField(blank=True, default=list)),
                ('roles', models.JSONField(blank=True, default=dict)),
                ('by_type', models.JSONField(blank=True, default=dict)),
                ('modalities', models.JSONField(blank=True, default=list)),
                ('revision', models.PositiveIntegerField(default=1)),
                ('created_at', models.DateTimeField()),
                ('state_since', models.DateTimeField(null=True)),
                ('model', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='versions', to='models_registry.model')),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('model', 'version'), name='version_once_per_model')],
                'ordering': ['model_id', '-id'],
            },
        ),
        migrations.CreateModel(
            name='CompileCache',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('instance_type', models.CharField(help_text='Instance type that it was compiled on.', max_length=64)),
                ('rank', models.PositiveIntegerField(help_text='Rank of the cell whose engine compiled it.')),
                ('key', models.CharField(help_text='Digest of engine, drivers, devices, processor, arguments and paths, by the agent.', max_length=64)),
                ('digest', models.CharField(help_text='`sha256:` and the digest of its archive.', max_length=80)),
                ('packed_bytes', models.BigIntegerField(help_text='Bytes that a node fetches.')),
                ('unpacked_bytes', models.BigIntegerField(help_text='Bytes on a node.')),
                ('node', models.CharField(help_text='Node whose engine compiled it.', max_length=64)),
                ('cell', models.CharField(help_text='Its cell at that time.', max_length=128)),
                ('uses', models.PositiveIntegerField(default=0, help_text='How often nodes fetched it.')),
                ('used_at', models.DateTimeField(help_text='When a node fetched it last, or when it was compiled.')),
                ('created_at', models.DateTimeField()),
                ('version', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='compile_caches', to='models_registry.modelversion')),
            ],
            options={
                'ordering': ['-id'],
                'constraints': [models.UniqueConstraint(fields=('version', 'instance_type', 'rank', 'key'), name='compile_cache_once_per_key')],
            },
        ),
        migrations.CreateModel(
            name='ConfigurationSearch',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('deployment', models.CharField(max_length=96)),
                ('region', models.CharField(max_length=64)),
                ('instance_type', models.CharField(max_length=64)),
                ('workload', models.CharField(max_length=200)),
                ('slo', models.CharField(max_length=80)),
                ('seed', models.PositiveIntegerField(default=0)),
                ('varied', models.JSONField()),
                ('cells_before', models.JSONField(null=True)),
                ('rules', models.JSONField(blank=True, default=dict)),
                ('most_trials', models.PositiveIntegerField()),
                ('most_hours', models.FloatField()),
                ('state', models.CharField(choices=[('queued', 'Queued'), ('running', 'Running'), ('done', 'Done'), ('failed', 'Failed'), ('cancelled', 'Cancelled')], default='running', max_length=16)),
                ('ends_as', models.CharField(blank=True, max_length=16)),
                ('reason', models.TextField(blank=True)),
                ('found', models.TextField(blank=True)),
                ('actor', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField()),
                ('seen_at', models.DateTimeField()),
                ('ended_at', models.DateTimeField(null=True)),
                ('version', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='models_registry.modelversion')),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='Benchmark',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('deployment', models.CharField(max_length=96)),
                ('region', models.CharField(max_length=64)),
                ('state', models.CharField(choices=[('queued', 'Queued'), ('running', 'Running'), ('done', 'Done'), ('failed', 'Failed'), ('cancelled', 'Cancelled')], default='queued', max_length=16)),
                ('reason', models.TextField(blank=True)),
                ('key', models.CharField(blank=True, db_index=True, max_length=16)),
                ('conditions', models.CharField(blank=True, db_index=True, max_length=16)),
                ('version_digest', models.CharField(blank=True, max_length=16)),
                ('instance_type', models.CharField(blank=True, max_length=64)),
                ('fingerprint', models.CharField(blank=True, max_length=16)),
                ('workload', models.CharField(max_length=200)),
                ('slo', models.CharField(max_length=80)),
                ('seed', models.PositiveIntegerField(default=0)),
                ('rules', models.JSONField(blank=True, default=dict)),
                ('beside_traffic', models.BooleanField(default=False)),
                ('cells', models.PositiveIntegerField(default=0)),
                ('split', models.CharField(blank=True, max_length=40)),
                ('chips', models.PositiveIntegerField(default=0)),
                ('watts', models.FloatField(default=0)),
                ('price_per_hour', models.FloatField(default=0)),
                ('statistics', models.JSONField(blank=True, default=dict)),
                ('first_rate', models.FloatField(null=True)),
                ('progress', models.JSONField(blank=True, default=dict)),
                ('troubles', models.PositiveIntegerField(default=0)),
                ('goodput', models.FloatField(null=True)),
                ('broke_at', models.FloatField(null=True)),
                ('concurrency', models.FloatField(null=True)),
                ('actor', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField()),
                ('started_at', models.DateTimeField(null=True)),
                ('seen_at', models.DateTimeField(null=True)),
                ('ended_at', models.DateTimeField(null=True)),
                ('version', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='benchmarks', to='models_registry.modelversion')),
            ],
            options={
                'constraints': [models.UniqueConstraint(condition=models.Q(('state', 'running')), fields=('state',), name='benchmark_running_once')],
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='SearchCandidate',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveIntegerField()),
                ('choice', models.JSONField()),
                ('refused', models.TextField(blank=True)),
                ('search', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='candidates', to='models_registry.configurationsearch')),
                ('version', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='models_registry.modelversion')),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('search', 'number'), name='search_candidate_once')],
                'ordering': ['search_id', 'number'],
            },
        ),
        migrations.AddField(
            model_name='configurationsearch',
            name='best',
            field=models.OneToOneField(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='models_registry.searchcandidate'),
        ),
        migrations.CreateModel(
            name='SearchTrial',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('fidelity', models.FloatField()),
                ('score', models.FloatField(null=True)),
                ('begun_at', models.DateTimeField()),
                ('benchmark', models.OneToOneField(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='trial', to='models_registry.benchmark')),
                ('candidate', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='trials', to='models_registry.searchcandidate')),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('candidate', 'fidelity'), name='search_trial_once')],
                'ordering': ['id'],
            },
        ),
        migrations.CreateModel(
            name='SpeculationCalibration',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('document', models.JSONField()),
                ('step_costs', models.JSONField(blank=True, default=list)),
                ('figures', models.JSONField()),
                ('choices', models.JSONField(blank=True, default=list)),
                ('actor', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField()),
                ('version', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='calibrations', to='models_registry.modelversion')),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='Validation',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version_revision', models.PositiveIntegerField()),
                ('state', models.CharField(choices=[('running', 'Running'), ('passed', 'Passed'), ('failed', 'Failed')], default='running', max_length=16)),
                ('reason', models.TextField(blank=True)),
                ('actor', models.CharField(max_length=64)),
                ('files_total', models.PositiveIntegerField(default=0)),
                ('files_done', models.PositiveIntegerField(default=0)),
                ('bytes_total', models.BigIntegerField(default=0)),
                ('bytes_done', models.BigIntegerField(default=0)),
                ('checked', models.JSONField(blank=True, default=dict)),
                ('troubles', models.PositiveIntegerField(default=0)),
                ('evidence', models.JSONField(blank=True, default=dict)),
                ('started_at', models.DateTimeField()),
                ('seen_at', models.DateTimeField()),
                ('ended_at', models.DateTimeField(null=True)),
                ('version', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='validations', to='models_registry.modelversion')),
            ],
            options={
                'constraints': [models.UniqueConstraint(condition=models.Q(('state', 'running')), fields=('version',), name='validation_running_once')],
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='BenchmarkPoint',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveIntegerField()),
                ('rate', models.FloatField()),
                ('verdict', models.CharField(max_length=16)),
                ('reason', models.TextField()),
                ('figures', models.JSONField()),
                ('histograms', models.JSONField()),
                ('measured_at', models.DateTimeField()),
                ('benchmark', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='points', to='models_registry.benchmark')),
            ],
            options={
                'ordering': ['benchmark_id', 'number'],
                'constraints': [models.UniqueConstraint(fields=('benchmark', 'number'), name='benchmark_point_once'), models.UniqueConstraint(fields=('benchmark', 'rate'), name='benchmark_rate_once')],
            },
        ),
        migrations.AddConstraint(
            model_name='configurationsearch',
            constraint=models.UniqueConstraint(condition=models.Q(('state', 'running')), fields=('deployment',), name='search_running_once'),
        ),
        *_BY_HAND,
    ]
