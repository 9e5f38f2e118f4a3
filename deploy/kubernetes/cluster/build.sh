#!/usr/bin/env bash
# Makes what cluster.sh needs, in a directory, and leaves out what is there already:
#
#	bin/		the programs of Kubernetes, etcd, CoreDNS, JobSet and Kubeflow Trainer, built from
#			the Go module proxy
#	jobset.yaml	the manifests of JobSet
#	kubeflow.yaml	the types and webhooks of Kubeflow Trainer
#	root/		the files of a host: Debian sid with containerd, runc, CNI plugins and BusyBox
#
#	build.sh DIR
#
# Needs Go, debootstrap, root, 5 GB of disk, and 15 minutes of two cores. The modules
# k8s.io/kubernetes replaces by directories are published as k8s.io/NAME v0.MINOR.PATCH.
set -euo pipefail
out=$(realpath -m "${1:?DIR}")
kubernetes=v1.37.2 etcd=v3.7.3 coredns=v1.15.0 jobset=v0.12.0 kubeflow=v2.2.1
staging=v0.${kubernetes#v1.}
export GOFLAGS=-mod=mod CGO_ENABLED=0 GOWORK=off
mkdir -p "$out/bin" "$out/src"

absent() { [ ! -x "$out/bin/$1" ]; }

# replaced prints a go.mod that requires Kubernetes.
replaced() {
	local mod
	mod=$(cd "$out/src" && go list -m -f '{{.GoMod}}' "k8s.io/kubernetes@$kubernetes")
	echo "module $1"
	sed -n 's/^go /go /p' "$mod"
	echo "godebug default=go1.26"
	echo "require k8s.io/kubernetes $kubernetes"
	sed -n "s#^\s*\(k8s.io/[a-z-]*\) => ./staging/.*#replace \1 => \1 $staging#p" "$mod"
}

programs="kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl"
for program in $programs; do
	absent "$program" || continue
	dir=$out/src/kubernetes
	if [ ! -f "$dir/go.sum" ]; then
		mkdir -p "$dir"
		replaced local/kubernetes >"$dir/go.mod"
		{
			printf '//go:build tools\n\npackage tools\n\nimport (\n'
			for p in $programs; do printf '\t_ "k8s.io/kubernetes/cmd/%s"\n' "$p"; done
			echo ")"
		} >"$dir/tools.go"
		go -C "$dir" mod tidy -e 2>"$dir/tidy.log" >&2 # -e: tests of Kubernetes import what is not published
	fi
	v=k8s.io/component-base/version c=k8s.io/client-go/pkg/version
	go -C "$dir" build -trimpath -ldflags "-s -w -X $v.gitVersion=$kubernetes -X $v.gitMajor=1 -X $v.gitMinor=${staging#v0.} -X $v.gitTreeState=clean -X $c.gitVersion=$kubernetes" \
		-o "$out/bin/" "k8s.io/kubernetes/cmd/$program"
done

# main NAME MODULE VERSION IMPORTS CALL builds a program of one call.
main() {
	local dir=$out/src/$1 import
	absent "$1" || return 0
	mkdir -p "$dir"
	[ -f "$dir/go.mod" ] || (cd "$dir" && go mod init "local/$1" 2>/dev/null)
	{
		printf 'package main\n\nimport (\n'
		for import in $4; do printf '\t%s\n' "$import"; done
		printf ')\n\nfunc main() { %s }\n' "$5"
	} >"$dir/main.go"
	# shellcheck disable=SC2086
	go -C "$dir" get $2@$3 ${6:-}
	go -C "$dir" build -trimpath -ldflags "-s -w" -o "$out/bin/$1" .
}

main etcd go.etcd.io/etcd/server/v3 $etcd '"os" "go.etcd.io/etcd/server/v3/etcdmain"' 'etcdmain.Main(os.Args)'
# Only the plugins that cluster.sh configures.
d=github.com/coredns/coredns
main coredns $d $coredns "\"$d/coremain\" _\"$d/plugin/bind\" _\"$d/plugin/cache\" _\"$d/plugin/errors\" _\"$d/plugin/kubernetes\"" 'coremain.Run()' \
	"k8s.io/api@$staging k8s.io/apimachinery@$staging k8s.io/client-go@$staging" # they are compiled already

# only NAME MODULE VERSION PACKAGE LDFLAGS builds a program by a go.mod of one requirement,
# which has the versions of the module's own. `go install` would ask the proxy for a list of
# versions too, which not every proxy has. Its directory of sources is in $source.
only() {
	local dir=$out/src/$1
	mkdir -p "$dir"
	printf 'module local/%s\n\ngo 1.26.0\n\nrequire %s %s\n' "$1" "$2" "$3" >"$dir/go.mod"
	go -C "$dir" build -trimpath -ldflags "-s -w $5" -o "$out/bin/" "$4"
	source=$(go -C "$dir" list -m -f '{{.Dir}}' "$2")
}

# manifests FILE DIR… writes what kustomize makes of directories of $source.
manifests() {
	local dir
	for dir in "${@:2}"; do
		"$out/bin/kubectl" kustomize "$source/$dir"
		echo ---
	done >"$out/$1.part"
	mv "$out/$1.part" "$out/$1"
}

if absent jobset || [ ! -f "$out/jobset.yaml" ]; then
	only jobset sigs.k8s.io/jobset $jobset sigs.k8s.io/jobset "-X sigs.k8s.io/jobset/pkg/version.GitVersion=$jobset"
	manifests jobset.yaml config/default
fi
if absent trainer-controller-manager || [ ! -f "$out/kubeflow.yaml" ]; then
	kubeflow_module=github.com/kubeflow/trainer/v2
	only kubeflow $kubeflow_module $kubeflow $kubeflow_module/cmd/trainer-controller-manager ""
	manifests kubeflow.yaml manifests/base/crds manifests/base/webhook
fi

if [ ! -x "$out/root/usr/bin/containerd" ]; then
	root=$out/root
	rm -rf "$root"
	debootstrap --variant=minbase --no-check-gpg --include=ca-certificates,iproute2,procps,iptables sid "$root" >"$out/root.log"
	printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
	chmod +x "$root/usr/sbin/policy-rc.d"
	mount --bind /proc "$root/proc"
	trap 'umount "$root/proc"' EXIT
	DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get install -y -qq --no-install-recommends containerd runc containernetworking-plugins busybox-static >>"$out/root.log"
	chroot "$root" apt-get clean
fi
"$out/bin/kubelet" --version
