# Every change of what the API shows is noted for those who watch it (docs/adr/0028-rest-conventions.md).

from django.db import migrations

from kernel.change_triggers import RecordChanges

NAME = '{row}.name'
ID = '{row}.id::text'


class Migration(migrations.Migration):

    dependencies = [
        ('kernel', '0002_rest_conventions'),
        ('fleet', '0007_load_history'),
    ]

    operations = [
        RecordChanges(table='fleet_region', kind='region', thing='name', key=NAME),
        RecordChanges(table='fleet_instancetype', kind='instance-type', thing='name', key=NAME),
        RecordChanges(
            table='fleet_deployment',
            kind='deployment',
            thing='name',
            key=NAME,
            columns=['model_version_id', 'instance_type_id', 'serving_class', 'drain_deadline_s', 'update_policy'],
        ),
        RecordChanges(
            table='fleet_deploymentregion',
            kind='deployment',
            thing='deployment_id',
            key="{row}.deployment_id",
        ),
        RecordChanges(table='fleet_node', kind='node', thing='id', key=ID),
        RecordChanges(
            table='fleet_nodereport',
            kind='node',
            thing='node_id',
            key="{row}.node_id",
            columns=['connected', 'state', 'generation', 'engine_pid'],
        ),
        RecordChanges(table='fleet_cell', kind='cell', thing='id', key=ID),
        RecordChanges(table='fleet_cellmember', kind='cell', thing='cell_id', key="{row}.cell_id"),
        RecordChanges(table='fleet_cellmember', kind='node', thing='node_id', key="{row}.node_id"),
        RecordChanges(table='fleet_rollout', kind='rollout', thing='id', key=ID),
        RecordChanges(table='fleet_incident', kind='incident', thing='id', key=ID),
        RecordChanges(table='fleet_replacement', kind='incident', thing='incident_id', key="{row}.incident_id::text"),
        RecordChanges(table='fleet_faultrule', kind='fault-rule', thing='rule', key='{row}.rule'),
        RecordChanges(table='fleet_webhook', kind='webhook', thing='id', key=NAME),
        RecordChanges(table='fleet_webhookdelivery', kind='webhook-delivery', thing='id', key=ID),
    ]
