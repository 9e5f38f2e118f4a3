#!/usr/bin/env bash
# A whole Kubernetes on this machine: etcd, API server, controller manager, scheduler and
# CoreDNS on the host ctl, and kubelets with containerd and runc on the hosts n1 and n2.
# There is no kube-proxy. The controllers of JobSet and of Kubeflow Trainer run on ctl, if
# build.sh has made them. A host is a set of namespaces: it has its own processes, network,
# name, files, /tmp and /dev/shm. SHARED is on all hosts, as a network filesystem would be.
# The network of the machine is left alone.
#
#	cluster.sh up IMAGE.tar…	start everything; the images are imported on each node
#	cluster.sh on HOST COMMAND…	run a command on a host
#	cluster.sh cut HOST		drop what the host sends and receives; cluster.sh heal HOST
#	cluster.sh crash HOST		end all of a host at once: only its disk stays
#	cluster.sh boot HOST		start it again
#	cluster.sh dns stop|start	stop or start CoreDNS
#	cluster.sh down			end everything
#
# Environment: KUBE is the directory of build.sh, LAB an empty directory for all state, with
# SHARED=LAB/shared. SEES are directories of this machine, one on each line, which hosts see
# below /machine, read-only. Exit code 3: this machine cannot run it; the last line has the reason.
set -euo pipefail
: "${KUBE:?the directory of build.sh}" "${LAB:?a directory for the state}"
self=$(realpath "${BASH_SOURCE[0]}")
bin=$KUBE/bin etc=$LAB/etc
hosts="ctl n1 n2" nodes="n1 n2" switch=kube-sw
admin=$etc/admin.kubeconfig

none() {
	echo "no cluster: $1"
	exit 3
}

possible() {
	[ "$(id -u)" -eq 0 ] || none "its hosts are namespaces, which root makes"
	[ -d /sys/fs/cgroup/memory ] || none "its kubelets are configured for cgroups of version 1"
	local program
	for program in etcd coredns kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl; do
		[ -x "$bin/$program" ] || none "no $bin/$program; run build.sh $KUBE"
	done
	[ -x "$KUBE/root/usr/bin/containerd" ] || none "no $KUBE/root/usr/bin/containerd; run build.sh $KUBE"
	for program in ip nsenter unshare openssl python3; do
		command -v $program >/dev/null || none "no $program"
	done
	[ -z "$(ip netns list | grep -E '^kube-' || true)" ] || none "another one runs: there are network namespaces named kube-…"
}

address() { case $1 in ctl) echo 10.77.0.10 ;; *) echo "10.77.0.${1#n}" ;; esac; }

# host starts the namespaces of a host. Its first process only waits.
host() {
	local n=$1 d=$LAB/hosts/$1 sees
	mapfile -t sees < <(printf '%s' "${SEES:-}")
	mkdir -p "$d"/{upper,work,root,disk}
	ip netns add "kube-$n"
	ip -n $switch link add "v-$n" type veth peer name eth0 netns "kube-$n"
	ip -n $switch link set "v-$n" master br0 up
	ip -n "kube-$n" addr add "$(address "$n")/24" dev eth0
	ip -n "kube-$n" link set eth0 up
	ip -n "kube-$n" link set lo up
	ip -n "kube-$n" route add default via 10.77.0.254
	nsenter --net="/run/netns/kube-$n" setsid unshare --mount --uts --ipc --pid --fork --kill-child --propagation private bash -c '
		set -e
		n=$1 d=$2 kube=$3 lab=$4
		mount -t overlay overlay -o "lowerdir=$kube/root,upperdir=$d/upper,workdir=$d/work" "$d/root"
		cd "$d/root"
		mkdir -p old dev proc sys run tmp var/lib/node
		mount -t proc proc proc
		mount -t sysfs sysfs sys
		mount --rbind /sys/fs/cgroup sys/fs/cgroup
		mount -t tmpfs tmpfs dev
		for f in null zero full random urandom tty fuse kmsg; do
			if [ -e /dev/$f ]; then touch dev/$f; mount --bind /dev/$f dev/$f; fi
		done
		mkdir dev/shm dev/pts
		mount -t tmpfs -o size=4g tmpfs dev/shm
		mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
		ln -s pts/ptmx dev/ptmx
		ln -s /proc/self/fd dev/fd
		ln -s fd/0 dev/stdin; ln -s fd/1 dev/stdout; ln -s fd/2 dev/stderr
		mount -t tmpfs tmpfs run
		mount -t tmpfs tmpfs tmp; chmod 1777 tmp
		mount --bind "$d/disk" var/lib/node # overlayfs cannot lie on overlayfs
		for b in "$lab/shared" "$lab/etc" "$lab/log" "$kube/bin"; do mkdir -p ".$b"; mount --bind "$b" ".$b"; done # maybe in tmp
		rm -f etc/resolv.conf
		echo nameserver 10.77.0.10 >etc/resolv.conf
		printf "127.0.0.1 localhost\n%s" "$5" >etc/hosts
		for s in "${@:6}"; do mkdir -p "machine$s"; mount --bind "$s" "machine$s"; mount -o remount,bind,ro "machine$s"; done
		hostname "$n"
		pivot_root . old
		cd /
		umount -l /old
		mount --make-rshared /
		exec bash -c "while :; do sleep 3600 & wait; done"' init "$n" "$d" "$KUBE" "$LAB" \
		"$(for h in $hosts; do echo "$(address "$h") $h"; done)" "${sees[@]}" </dev/null >"$LAB/log/host.$n.log" 2>&1 &
	local parent=$!
	until_true 20 "host $n" arrived "$n" $parent
	on "$n" sysctl -qw net.ipv4.ip_forward=1
	local m
	for m in $nodes; do
		[ "$m" = "$n" ] || on "$n" ip route replace "10.88.${m#n}.0/24" via "$(address "$m")"
	done
	if [ "$n" = ctl ]; then
		on ctl ip addr add 10.96.0.1/32 dev lo # the Service kubernetes, in place of kube-proxy
	else
		on "$n" ip route replace 10.96.0.0/16 via "$(address ctl)"
	fi
}

# arrived reports whether the first process of a host is in its own files.
arrived() { pgrep -P "$2" >"$LAB/hosts/$1/pid" && on "$1" test -d /var/lib/node -a ! -e /old/usr; }

on() {
	local p
	p=$(cat "$LAB/hosts/$1/pid")
	shift
	nsenter --target "$p" --mount --uts --ipc --net --pid -- "$@"
}

# daemon HOST LOG COMMAND… starts a program on a host.
daemon() {
	local n=$1 log=$LAB/log/$2.log p
	shift 2
	p=$(cat "$LAB/hosts/$n/pid")
	setsid nsenter --target "$p" --mount --uts --ipc --net --pid -- "$@" </dev/null >>"$log" 2>&1 &
}

stop() {
	local p
	p=$(cat "$LAB/hosts/$1/pid" 2>/dev/null) || return 0
	kill -9 "$p" 2>/dev/null || true
	until_true 20 "host $1 has ended" gone "$p" || true
	ip netns del "kube-$1" 2>/dev/null || true
	ip -n $switch link del "v-$1" 2>/dev/null || true
	rm -f "$LAB/hosts/$1/pid"
}

gone() { ! kill -0 "$1"; }

kubectl() { nsenter --net=/run/netns/kube-ctl "$bin/kubectl" --kubeconfig "$admin" "$@"; }

# credentials makes the certificates and tokens of the cluster.
credentials() {
	cd "$etc"
	openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 30 -subj /CN=ca 2>/dev/null
	openssl genrsa -out sa.key 2048 2>/dev/null
	openssl rsa -in sa.key -pubout -out sa.pub 2>/dev/null
	openssl req -newkey rsa:2048 -nodes -keyout api.key -out api.csr -subj /CN=kube-apiserver 2>/dev/null
	openssl x509 -req -in api.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out api.crt 2>/dev/null \
		-extfile <(echo "subjectAltName=IP:10.77.0.10,IP:10.96.0.1,DNS:kubernetes.default.svc")
	local n
	echo "token-admin,admin,admin,system:masters" >tokens.csv
	for n in $nodes; do echo "token-$n,system:node:$n,$n,system:nodes" >>tokens.csv; done
	for n in admin $nodes; do
		cat >"$n.kubeconfig" <<-CONFIG
			apiVersion: v1
			kind: Config
			clusters: [{name: c, cluster: {server: "https://10.77.0.10", certificate-authority: $etc/ca.crt}}]
			users: [{name: u, user: {token: token-$n}}]
			contexts: [{name: c, context: {cluster: c, user: u}}]
			current-context: c
		CONFIG
	done
	cd - >/dev/null
}

# pause makes the image of the process that holds a pod's namespaces.
pause() {
	python3 - "$KUBE/root/bin/busybox" "$LAB/pause.tar" <<-'PYTHON'
		import hashlib, io, json, sys, tarfile
		def tar(files, out):
		    with tarfile.open(fileobj=out, mode="w") as t:
		        for name, data, mode in files:
		            info = tarfile.TarInfo(name)
		            info.size, info.mode = len(data), mode
		            t.addfile(info, io.BytesIO(data))
		layer = io.BytesIO()
		tar([("busybox", open(sys.argv[1], "rb").read(), 0o755)], layer)
		config = json.dumps({"architecture": "amd64", "os": "linux",
		    "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer.getvalue()).hexdigest()]},
		    "config": {"Entrypoint": ["/busybox", "sleep", "2147483647"]}}).encode()
		manifest = json.dumps([{"Config": "config.json", "RepoTags": ["docker.io/local/pause:1"], "Layers": ["layer.tar"]}]).encode()
		with open(sys.argv[2], "wb") as out:
		    tar([("config.json", config, 0o644), ("layer.tar", layer.getvalue(), 0o644), ("manifest.json", manifest, 0o644)], out)
	PYTHON
}

control() {
	daemon ctl etcd "$bin/etcd" --data-dir /var/lib/node/etcd --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
		--listen-peer-urls http://127.0.0.1:2380 --log-level warn --unsafe-no-fsync
	daemon ctl apiserver "$bin/kube-apiserver" --etcd-servers http://127.0.0.1:2379 --bind-address 0.0.0.0 --advertise-address 10.77.0.10 --secure-port 443 \
		--tls-cert-file "$etc/api.crt" --tls-private-key-file "$etc/api.key" --token-auth-file "$etc/tokens.csv" --authorization-mode Node,RBAC \
		--client-ca-file "$etc/ca.crt" --service-cluster-ip-range 10.96.0.0/16 --service-account-issuer https://kubernetes.default.svc \
		--service-account-key-file "$etc/sa.pub" --service-account-signing-key-file "$etc/sa.key"
	until_true 120 "the API server is ready" kubectl get --raw /readyz
	daemon ctl controllers "$bin/kube-controller-manager" --kubeconfig "$admin" --use-service-account-credentials --service-account-private-key-file "$etc/sa.key" \
		--root-ca-file "$etc/ca.crt" --leader-elect=false --node-monitor-period 2s --node-monitor-grace-period 16s
	daemon ctl scheduler "$bin/kube-scheduler" --kubeconfig "$admin" --leader-elect=false
	cat >"$etc/Corefile" <<-CORE
		.:53 {
			errors
			bind 10.77.0.10
			kubernetes cluster.local {
				kubeconfig $admin c
				ttl 1
			}
			cache 1
		}
	CORE
	dns start
	[ ! -x "$bin/jobset" ] || jobset
	[ ! -x "$bin/trainer-controller-manager" ] || kubeflow
}

# extension NAME PORT WEBHOOKS DIR makes ready what a controller that runs as a process needs,
# not as a Deployment: its webhooks have an address of this host, and a certificate of the
# cluster in DIR.
extension() {
	local name=$1 d=$4 log=$LAB/log/$1.apply.log
	mkdir -p "$d"
	openssl req -newkey rsa:2048 -nodes -keyout "$d/tls.key" -out "$d/tls.csr" -subj "/CN=$name" 2>/dev/null
	openssl x509 -req -in "$d/tls.csr" -CA "$etc/ca.crt" -CAkey "$etc/ca.key" -CAcreateserial -days 30 -out "$d/tls.crt" 2>/dev/null \
		-extfile <(echo "subjectAltName=IP:10.77.0.10")
	python3 - "$KUBE/$name.yaml" "$etc/ca.crt" "$2" "$3" >"$etc/$name.manifests.yaml" <<-'PYTHON'
		import base64, re, sys
		text, ca = (open(name).read() for name in sys.argv[1:3])
		address = r"\1caBundle: " + base64.b64encode(ca.encode()).decode() + rf"\n\1url: https://10.77.0.10:{sys.argv[3]}\2"
		text, webhooks = re.subn(r"^( +)service:\n\1  name: \S+\n\1  namespace: \S+\n\1  path: (\S+)$", address, text, flags=re.M)
		if webhooks != int(sys.argv[4]):
		    sys.exit(f"{sys.argv[1]} has {webhooks} webhooks, not {sys.argv[4]}")
		print("\n---\n".join(doc for doc in text.split("\n---\n") if not re.search(r"^kind: Deployment$", doc, re.M)))
	PYTHON
	kubectl apply --server-side -f "$etc/$name.manifests.yaml" >"$log"
	kubectl wait --for=condition=Established crd --all --timeout=60s >>"$log"
}

answers() {
	until_true 60 "the webhooks of $1 answer" on ctl bash -c "exec 3<>/dev/tcp/10.77.0.10/$2"
}

jobset() {
	local d=$etc/jobset
	extension jobset 9443 5 "$d"
	cat >"$d/config.yaml" <<-CONFIG
		apiVersion: config.jobset.x-k8s.io/v1alpha1
		kind: Configuration
		webhook: {certDir: $d}
		metrics: {bindAddress: "0"}
		leaderElection: {leaderElect: false}
		internalCertManagement: {enable: false}
	CONFIG
	daemon ctl jobset env "KUBECONFIG=$admin" "$bin/jobset" --config "$d/config.yaml"
	answers JobSet 9443
}

kubeflow() {
	local d=$etc/kubeflow
	extension kubeflow 9444 4 "$d/k8s-webhook-server/serving-certs" # below TMPDIR, where it looks
	cat >"$d/config.yaml" <<-CONFIG
		apiVersion: config.trainer.kubeflow.org/v1alpha1
		kind: Configuration
		webhook: {port: 9444}
		metrics: {bindAddress: "0"}
		health: {healthProbeBindAddress: "127.0.0.1:8091"}
		leaderElection: {leaderElect: false}
		certManagement: {enable: false}
	CONFIG
	daemon ctl kubeflow env "KUBECONFIG=$admin" "TMPDIR=$d" "$bin/trainer-controller-manager" --config "$d/config.yaml"
	answers "Kubeflow Trainer" 9444
}

dns() {
	case $1 in
	start)
		daemon ctl coredns bash -c 'echo $$ >/run/coredns.pid; exec "$@"' coredns "$bin/coredns" -conf "$etc/Corefile"
		;;
	stop) on ctl bash -c 'kill -9 "$(cat /run/coredns.pid)"' ;;
	esac
}

# node starts containerd and the kubelet of a host.
node() {
	local n=$1 c f
	for c in /sys/fs/cgroup/*/; do
		[ "$c" = /sys/fs/cgroup/unified/ ] || mkdir -p "$c/kube-$n"
	done
	for f in cpus mems; do cat /sys/fs/cgroup/cpuset/cpuset.$f >"/sys/fs/cgroup/cpuset/kube-$n/cpuset.$f"; done
	on "$n" bash -s "$n" "${n#n}" <<-'HOST'
		mkdir -p /etc/cni/net.d /etc/kubelet /var/lib/node/{containerd,kubelet}
		cat >/etc/cni/net.d/10-pods.conflist <<C
		{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","bridge":"cni0","isGateway":true,"ipam":{"type":"host-local","dataDir":"/run/cni","ranges":[[{"subnet":"10.88.$2.0/24"}]],"routes":[{"dst":"0.0.0.0/0"}]}}]}
		C
		# restrict_oom_score_adj: a root without CAP_SYS_RESOURCE may not lower a score.
		cat >/etc/containerd.toml <<C
		version = 3
		root = "/var/lib/node/containerd"
		state = "/run/containerd"
		[grpc]
		  address = "/run/containerd/containerd.sock"
		[plugins.'io.containerd.cri.v1.images'.pinned_images]
		  sandbox = "docker.io/local/pause:1"
		[plugins.'io.containerd.cri.v1.runtime']
		  restrict_oom_score_adj = true
		[plugins.'io.containerd.cri.v1.runtime'.cni]
		  bin_dirs = ["/usr/lib/cni"]
		  conf_dir = "/etc/cni/net.d"
		[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
		  SystemdCgroup = false
		C
		cat >/etc/kubelet/config.yaml <<C
		apiVersion: kubelet.config.k8s.io/v1beta1
		kind: KubeletConfiguration
		failCgroupV1: false
		cgroupDriver: cgroupfs
		cgroupRoot: /kube-$1
		enforceNodeAllocatable: []
		authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
		authorization: {mode: AlwaysAllow}
		containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
		clusterDNS: [10.77.0.10]
		clusterDomain: cluster.local
		failSwapOn: false
		evictionHard: {memory.available: 100Mi}
		imageGCHighThresholdPercent: 100
		imageGCLowThresholdPercent: 99
		nodeStatusUpdateFrequency: 4s
		nodeLeaseDurationSeconds: 12
		C
	HOST
	daemon "$n" "containerd.$n" containerd --config /etc/containerd.toml
	until_true 60 "containerd answers on $n" on "$n" ctr version
	for image in "$LAB/pause.tar" $(cat "$LAB/images"); do
		on "$n" ctr -n k8s.io images import --digests=false - <"$image" >/dev/null
	done
	daemon "$n" "kubelet.$n" "$bin/kubelet" --config /etc/kubelet/config.yaml --kubeconfig "$etc/$n.kubeconfig" --root-dir /var/lib/node/kubelet \
		--hostname-override "$n" --node-ip "$(address "$n")"
}

ready() { [ "$(kubectl get nodes "$1" -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}' 2>/dev/null)" = True ]; }

until_true() {
	local end=$((SECONDS + $1)) what=$2
	shift 2
	until "$@" >/dev/null 2>&1; do
		if [ "$SECONDS" -ge "$end" ]; then
			echo "timed out: $what; see $LAB/log"
			return 1
		fi
		sleep 0.2
	done
}

up() {
	possible
	mkdir -p "$LAB"/{etc,hosts,log,shared}
	chmod 700 "$LAB/etc"
	realpath "$@" >"$LAB/images"
	ip netns add $switch
	ip -n $switch link add br0 type bridge
	ip -n $switch addr add 10.77.0.254/24 dev br0
	ip -n $switch link set br0 up
	local n
	for n in $hosts; do host "$n"; done
	credentials
	pause
	control
	for n in $nodes; do node "$n"; done
	for n in $nodes; do until_true 120 "$n is ready" ready "$n"; done
	kubectl get nodes -o wide
}

down() {
	local n c
	for n in $hosts; do stop "$n"; done
	ip netns del $switch 2>/dev/null || true
	for n in $nodes; do
		for c in /sys/fs/cgroup/*/"kube-$n"; do
			[ ! -d "$c" ] || find "$c" -depth -type d -exec rmdir {} + || true
		done
	done
}

case ${1:-} in
up) up "${@:2}" ;;
on) on "${@:2}" ;;
cut) ip -n $switch link set "v-${2:?}" nomaster ;;
heal) ip -n $switch link set "v-${2:?}" master br0 ;;
crash) stop "${2:?}" ;;
boot)
	host "${2:?}"
	node "$2"
	;;
dns) dns "${2:?}" ;;
down) down ;;
*)
	sed -n '2,/^set/s/^# \{0,1\}//p' "$self"
	exit 64
	;;
esac
