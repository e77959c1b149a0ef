"""Print the errors of the documents in a manifest, by the schemas of a Kubernetes version, as JSON."""

import json
import sys
from pathlib import Path

import kubernetes_validate
import yaml


def main(path: str, version: str) -> None:
    errors = []
    for document in yaml.safe_load_all(Path(path).read_text()):
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            errors.append(f"{document['kind']}: {error.message}")
    print(json.dumps(errors))


if __name__ == "__main__":
    main(*sys.argv[1:])
