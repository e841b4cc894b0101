#!/bin/bash
# Builds Helm as DIR/helm from its Go module, with the Go on PATH (1.24 or later). About 2 minutes on 2 cores.
#
#     tests/kubernetes/build_helm.sh DIR
set -euo pipefail

dir=$(realpath -m "${1:?usage: build_helm.sh DIR}")
[ -x "$dir/helm" ] && exit 0
command -v go >/dev/null || { echo "error: Helm is built with Go 1.24 or later, which is not on PATH" >&2; exit 1; }
GOBIN=$dir GOFLAGS='' CGO_ENABLED=0 go install -trimpath -ldflags '-s -w' helm.sh/helm/v3/cmd/helm@v3.19.5
