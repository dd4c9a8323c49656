import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('auth', '0012_alter_user_first_name_max_length'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name='Approval',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('action', models.CharField(max_length=48)),
                ('summary', models.TextField()),
                ('arguments', models.JSONField(blank=True, default=dict)),
                ('secrets', models.JSONField(blank=True, default=dict)),
                ('approvers', models.JSONField(blank=True, default=list)),
                ('deployment', models.CharField(blank=True, max_length=128)),
                ('region', models.CharField(blank=True, max_length=64)),
                ('why', models.CharField(blank=True, max_length=200)),
                ('state', models.CharField(choices=[('pending', 'Pending'), ('done', 'Done'), ('rejected', 'Rejected'), ('withdrawn', 'Withdrawn'), ('expired', 'Expired'), ('failed', 'Failed')], default='pending', max_length=16)),
                ('requested_by', models.CharField(max_length=64)),
                ('requested_at', models.DateTimeField()),
                ('expires_at', models.DateTimeField()),
                ('decided_by', models.CharField(blank=True, max_length=64)),
                ('decided_at', models.DateTimeField(null=True)),
                ('outcome', models.TextField(blank=True)),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='ApprovalRule',
            fields=[
                ('action', models.CharField(max_length=48, primary_key=True, serialize=False)),
                ('required', models.BooleanField()),
                ('actor', models.CharField(max_length=64)),
                ('changed_at', models.DateTimeField()),
            ],
            options={
                'ordering': ['action'],
            },
        ),
        migrations.CreateModel(
            name='GroupRole',
            fields=[
                ('group', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='role', serialize=False, to='auth.group')),
                ('role', models.CharField(choices=[('viewer', 'viewer'), ('operator', 'operator'), ('admin', 'admin')], max_length=16)),
                ('claim', models.CharField(blank=True, max_length=256)),
            ],
            options={
                'ordering': ['group__name'],
            },
        ),
        migrations.CreateModel(
            name='IdentityProvider',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('issuer', models.CharField(blank=True, help_text='The provider exactly as it names itself. Empty: no such login.', max_length=255)),
                ('client_id', models.CharField(default='switchyard', help_text="Switchyard's client at the provider.", max_length=255)),
                ('sealed_secret', models.TextField(blank=True)),
                ('title', models.CharField(default='single sign-on', help_text='Its name on the login page.', max_length=64)),
                ('scopes', models.CharField(default='openid profile email', help_text='Scopes to request; some providers need `groups`.', max_length=255)),
                ('groups_claim', models.CharField(default='groups', help_text="Claim that lists a user's groups.", max_length=64)),
                ('admit_all', models.BooleanField(default=False, help_text='Users in no mapped group are viewers; otherwise they are refused.')),
                ('tenants', models.JSONField(blank=True, default=dict, help_text='Group at the provider: tenant whose page its members see, read-only and without the console.')),
                ('actor', models.CharField(max_length=64)),
                ('changed_at', models.DateTimeField()),
            ],
        ),
        migrations.CreateModel(
            name='ServiceAccount',
            fields=[
                ('user', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='service_account', serialize=False, to=settings.AUTH_USER_MODEL)),
                ('description', models.CharField(blank=True, max_length=200)),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField()),
            ],
            options={
                'ordering': ['user__username'],
            },
        ),
        migrations.CreateModel(
            name='ApiToken',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('prefix', models.CharField(max_length=16, unique=True)),
                ('digest', models.CharField(max_length=64)),
                ('name', models.CharField(max_length=96)),
                ('scope', models.CharField(choices=[('read', 'read'), ('write', 'write'), ('admin', 'admin')], default='admin', max_length=8)),
                ('created_by', models.CharField(blank=True, max_length=64)),
                ('created_at', models.DateTimeField()),
                ('last_used_at', models.DateTimeField(null=True)),
                ('expires_at', models.DateTimeField(null=True)),
                ('revoked_at', models.DateTimeField(null=True)),
                ('made_with', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='made', to='accounts.apitoken')),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='api_tokens', to=settings.AUTH_USER_MODEL)),
            ],
        ),
        migrations.CreateModel(
            name='KeyChallenge',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('challenge', models.CharField(max_length=64, unique=True)),
                ('ceremony', models.CharField(max_length=8)),
                ('expires_at', models.DateTimeField()),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to=settings.AUTH_USER_MODEL)),
            ],
        ),
        migrations.CreateModel(
            name='LoginFailure',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('subject', models.CharField(max_length=64)),
                ('at', models.DateTimeField(db_index=True)),
            ],
            options={
                'indexes': [models.Index(fields=['subject', 'at'], name='login_failure_subject')],
            },
        ),
        migrations.CreateModel(
            name='LoginSession',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('session_key', models.CharField(max_length=40, unique=True)),
                ('method', models.CharField(max_length=16)),
                ('address', models.CharField(blank=True, max_length=64)),
                ('browser', models.CharField(blank=True, max_length=200)),
                ('created_at', models.DateTimeField()),
                ('seen_at', models.DateTimeField()),
                ('expires_at', models.DateTimeField()),
                ('factor_at', models.DateTimeField(null=True)),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='logins', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='SecondFactor',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('app', 'Authenticator app'), ('key', 'Security key')], max_length=16)),
                ('name', models.CharField(max_length=64)),
                ('secret', models.TextField(blank=True)),
                ('credential', models.TextField(blank=True)),
                ('last_count', models.BigIntegerField(default=0)),
                ('wrong_in_a_row', models.IntegerField(default=0)),
                ('created_at', models.DateTimeField()),
                ('last_used_at', models.DateTimeField(null=True)),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='second_factors', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ['id'],
            },
        ),
        migrations.CreateModel(
            name='Grant',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('deployment', models.CharField(max_length=96)),
                ('role', models.CharField(choices=[('viewer', 'viewer'), ('operator', 'operator'), ('admin', 'admin')], max_length=16)),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField()),
                ('group', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='grants', to='auth.group')),
                ('user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='grants', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ['deployment', 'id'],
                'constraints': [models.CheckConstraint(condition=models.Q(('user__isnull', True), ('group__isnull', True), _connector='XOR'), name='grant_to_one'), models.UniqueConstraint(fields=('user', 'deployment'), name='grant_once_a_user'), models.UniqueConstraint(fields=('group', 'deployment'), name='grant_once_a_group')],
            },
        ),
        migrations.CreateModel(
            name='Identity',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('issuer', models.CharField(max_length=255)),
                ('subject', models.CharField(max_length=255)),
                ('created_at', models.DateTimeField()),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='identities', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('issuer', 'subject'), name='identity_once')],
            },
        ),
        migrations.CreateModel(
            name='RecoveryCode',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('digest', models.CharField(max_length=64)),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='recovery_codes', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('user', 'digest'), name='recovery_code_once')],
            },
        ),
    ]
