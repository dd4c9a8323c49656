"""Where the bytes of files and batches lie, for every host of the control plane: a shared folder, or a bucket."""

from pathlib import Path

from django.conf import settings

from traffic.planning.object_uri import SCHEME, parse_object_uri
from traffic.services.file_bucket import BucketStore
from traffic.services.file_folder import FolderStore
from traffic.services.file_protocol import READ_BYTES, FileStore, FileWriter, NoSuchFile, StoreAway, pieces

__all__ = ["READ_BYTES", "FileStore", "FileWriter", "NoSuchFile", "StoreAway", "file_store", "pieces"]


def file_store() -> FileStore:
    if settings.FILES.startswith(SCHEME):
        return BucketStore(parse_object_uri(settings.FILES))
    return FolderStore(Path(settings.FILES))
