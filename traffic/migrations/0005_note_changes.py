# Every change of what the API shows is noted for those who watch it (docs/adr/0028-rest-conventions.md).

from django.db import migrations

from kernel.change_triggers import RecordChanges

ID = '{row}.id::text'


class Migration(migrations.Migration):

    dependencies = [
        ('kernel', '0002_rest_conventions'),
        ('traffic', '0004_async_requests'),
    ]

    operations = [
        RecordChanges(table='traffic_ingress', kind='ingress', thing='id', key=ID),
        RecordChanges(
            table='traffic_ingressreport',
            kind='ingress',
            thing='ingress_id',
            key="{row}.ingress_id",
            columns=['connected', 'revision', 'haproxy_pid', 'reason', 'cells'],
        ),
        RecordChanges(table='traffic_ingress', kind='key-ring', thing='id', key=ID),
        RecordChanges(
            table='traffic_ingressreport',
            kind='key-ring',
            thing='ingress_id',
            key="{row}.ingress_id",
            columns=['connected', 'revision'],
        ),
        RecordChanges(
            table='traffic_routingtable',
            kind='routing-table',
            thing='id',
            key="{row}.region_id || '@' || {row}.revision",
        ),
        RecordChanges(
            table='traffic_applicationkey',
            kind='key',
            thing='id',
            key='{row}.prefix',
            columns=['name', 'requests_per_min', 'tokens_per_min', 'max_concurrent', 'deployments', 'serving_class', 'expires_at', 'revoked_at', 'refused_everywhere_at'],
        ),
        RecordChanges(
            table='traffic_trafficmatrix',
            kind='matrix',
            thing='deployment_id',
            key="{row}.deployment_id",
            columns=['shares', 'revision', 'held', 'held_since'],
        ),
        RecordChanges(table='traffic_trafficshift', kind='shift', thing='id', key=ID, only_new=True),
        RecordChanges(
            table='traffic_trafficrule',
            kind='traffic-policy',
            thing='deployment_id',
            key="{row}.deployment_id",
        ),
        RecordChanges(table='traffic_trafficoverride', kind='override', thing='id', key=ID),
        RecordChanges(table='traffic_trafficoverride', kind='evacuation', thing='id', key=ID),
    ]
