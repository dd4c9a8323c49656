"""Which operation of S3 a request is. moto answers it; tests make some of them fail.

S3 tells operations apart by their query as well, which the paths of its model do not say.
"""

from urllib.parse import parse_qs

from lab.cloud.wire import Environ

_OF_OBJECTS = {
    ("GET", ""): "GetObject",
    ("HEAD", ""): "HeadObject",
    ("PUT", ""): "PutObject",
    ("DELETE", ""): "DeleteObject",
    ("POST", "uploads"): "CreateMultipartUpload",
    ("PUT", "uploadId"): "UploadPart",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
}
_OF_BUCKETS = {
    ("GET", "list-type"): "ListObjectsV2",
    ("GET", "uploads"): "ListMultipartUploads",
    ("POST", "delete"): "DeleteObjects",
}


def s3_operation(environ: Environ) -> str:
    """Its name, with the bucket in the path; "" for those that nothing here asks about."""
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    _, _, key = environ.get("PATH_INFO", "/").lstrip("/").partition("/")
    method = environ["REQUEST_METHOD"]
    table = _OF_OBJECTS if key else _OF_BUCKETS
    names = [name for name in ("uploadId", "uploads", "list-type", "delete") if name in query]
    return table.get((method, names[0] if names else ""), "")
