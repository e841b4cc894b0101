#!/bin/bash
# Builds a kube-apiserver for `make test-kubernetes`: v1.20.2 out of Debian 12's source package, which
# vendors every Go module, with Debian's Go 1.19. About 7 minutes on 2 cores; nothing but the Debian
# mirror is asked. Needs root for apt. The binary ends up as DIR/kube-apiserver, etcd comes from Debian.
#
#     tests/kubernetes/build_apiserver.sh DIR
set -euo pipefail

dir=$(realpath -m "${1:?usage: build_apiserver.sh DIR}")
build=$dir/build
repo=$build/go/src/k8s.io/kubernetes
mkdir -p "$build"/apt/{lists/partial,archives/partial} "$build/source" "$(dirname "$repo")"

apt-get install -y --no-install-recommends golang-1.19-go etcd-server etcd-client openssl dpkg-dev
[ -x "$dir/kube-apiserver" ] && exit 0

# The mirror this machine uses already, asked for sources.
mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -m1 '/debian/\?$')
echo "deb-src $mirror bookworm main" > "$build/sources.list"
from_sources=(
    -o Dir::Etc::sourcelist="$build/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::State::lists="$build/apt/lists" -o Dir::Cache="$build/apt" -o APT::Sandbox::User=root
)
apt-get "${from_sources[@]}" update
(cd "$build/source" && apt-get "${from_sources[@]}" source --download-only kubernetes)
rm -rf "$repo"
tar -xf "$build"/source/kubernetes_*.orig.tar.gz -C "$build/source"
mv "$build/source/kubernetes-1.20.2" "$repo"

export PATH=/usr/lib/go-1.19/bin:$PATH GOPATH=$build/go GOCACHE=$build/cache
export GO111MODULE=off GOTOOLCHAIN=local GOFLAGS='' CGO_ENABLED=0
cd "$repo"

# The OpenAPI definitions are generated code that the source package leaves out.
staging=staging/src/k8s.io
go build -o "$build/openapi-gen" k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
packages=$(
    grep -rlE '^//\s*\+k8s:openapi-gen=' --include='*.go' --exclude='*_test.go' pkg cmd "$staging" |
        xargs -n1 dirname | sort -u |
        sed "s#^staging/src/#k8s.io/kubernetes/vendor/#; t; s#^#k8s.io/kubernetes/#" | paste -sd,
)
"$build/openapi-gen" --logtostderr -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi \
    -O zz_generated.openapi -h hack/boilerplate/boilerplate.generatego.txt \
    -r "$build/violations.txt" --output-base "$build/go/src"

go build -ldflags '-s -w' -o "$dir/kube-apiserver" k8s.io/kubernetes/cmd/kube-apiserver
rm -rf "$build"
