package trainer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/ckptstore/ckptstore/gpu"
	"github.com/ckptstore/ckptstore/internal/launch"
)

// options parses a command line and an environment, and returns the rest of the
// line.
func options(t *testing.T, env map[string]string, args ...string) (o *runOptions, command []string, err error) {
	t.Helper()
	o = &runOptions{}
	f := pflag.NewFlagSet("run", pflag.ContinueOnError)
	f.SetInterspersed(false)
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
	})
	o.torchrunOptions.flags(f)
	o.nodesOptions.flags(f)
	o.backendOptions.flags(f)
	f.StringVar(&o.name, "name", "", "")
	f.IntVar(&o.maxRestarts, "max-restarts", 3, "")
	f.DurationVar(&o.grace, "grace", 10*time.Second, "")
	if err := f.Parse(args); err != nil {
		return o, nil, err
	}
	o.noteSharing(f)
	return o, f.Args(), o.defaults(f, func(name string) (string, bool) {
		v, ok := env[name]
		return v, ok
	})
}

// A flag takes precedence over PET_NAME, and PET_NAME over the default, in both
// spellings.
func TestPETDefaults(t *testing.T) {
	every := map[string]string{
		"PET_NPROC_PER_NODE": "4", "PET_NNODES": "2:3", "PET_NODE_RANK": "1", "PET_MAX_RESTARTS": "9",
		"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "h:1", "PET_RDZV_ID": "id", "PET_RDZV_CONF": "timeout=3",
		"PET_STANDALONE": "1", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "2345", "PET_LOCAL_ADDR": "l", "PET_ROLE": "r",
		"PET_START_METHOD": "fork", "PET_MONITOR_INTERVAL": "5", "PET_MODULE": "1", "PET_NO_PYTHON": "0", "PET_RUN_PATH": "2",
		"PET_EVENT_LOG_HANDLER": "null", "PET_SIGNALS_TO_HANDLE": "SIGTERM", "PET_SHUTDOWN_TIMEOUT": "77",
	}
	show := func(o *runOptions) string {
		return fmt.Sprint(o.nproc, " ", o.nnodes, " ", o.nodeRank, " ", o.maxRestarts, " ", o.rdzvBackend, " ", o.rdzvEndpoint, " ", o.rdzvID, " ",
			o.rdzvConf, " ", o.standalone, " ", o.masterAddr, " ", o.masterPort, " ", o.localAddr, " ", o.role, " ", o.startMethod, " ",
			o.monitorInterval, " ", o.module, " ", o.noPython, " ", o.runPath, " ", o.eventLogHandler, " ", o.toHandle, " ", o.grace)
	}
	for _, c := range []struct {
		env  map[string]string
		args []string
		want string
	}{
		{nil, nil, "1  0 3 static    false 127.0.0.1 0  default spawn 0.1 false false false null SIGTERM,SIGINT,SIGHUP,SIGQUIT 10s"},
		{every, nil, "4 2:3 1 9 c10d h:1 id timeout=3 true m 2345 l r fork 5 true false true null SIGTERM 1m17s"},
		{
			every,
			strings.Fields("--nproc_per_node=8 --nnodes 1 --node_rank=0 --max_restarts 2 --rdzv_backend static --rdzv-endpoint g:2 --rdzv_id jd --rdzv_conf a=b --standalone=false --master_addr n --master-port 1 --local_addr k --role s --start_method spawn --monitor_interval 1 --no_python --module=false --run-path=false --event_log_handler null --signals_to_handle SIGINT --shutdown-timeout 3"),
			"8 1 0 2 static g:2 jd a=b false n 1 k s spawn 1 false true false null SIGINT 3s",
		},
		{every, []string{"--nproc", "6", "--grace", "2s"}, "6 2:3 1 9 c10d h:1 id timeout=3 true m 2345 l r fork 5 true false true null SIGTERM 2s"},
	} {
		o, _, err := options(t, c.env, c.args...)
		if err != nil || show(o) != c.want {
			t.Errorf("%v: %v\n%s, want\n%s", c.args, err, show(o), c.want)
		}
	}
	for env, says := range map[string]string{
		"PET_NODE_RANK=one":        "PET_NODE_RANK: ",
		"PET_STANDALONE=yes":       `PET_STANDALONE is "yes": set it to 1 or 0`,
		"PET_MASTER_PORT=":         "PET_MASTER_PORT: ",
		"PET_VIRTUAL_LOCAL_RANK=1": `PET_VIRTUAL_LOCAL_RANK is "1", and this trainer has no --virtual-local-rank: unset it`,
		"PET_SHUTDOWN_TIMEOUT=0":   "--shutdown-timeout 0: give a number of seconds above 0",
	} {
		name, value, _ := strings.Cut(env, "=")
		if _, _, err := options(t, map[string]string{name: value}); !errors.Is(err, launch.ErrConfig) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: error %v, want %q", env, err, says)
		}
	}
	if _, _, err := options(t, map[string]string{"PET_VIRTUAL_LOCAL_RANK": "0"}); err != nil {
		t.Errorf("torchrun's default: %v", err)
	}
}

func TestTorchrunCommand(t *testing.T) {
	t.Setenv("PYTHON_EXEC", "")
	for line, want := range map[string]string{
		"train.py --lr 1":                "python3 -u train.py --lr 1 | train",
		"-- train.py --lr 1":             "python3 -u train.py --lr 1 | train",
		"--nproc 2 dir/train.py -m x":    "python3 -u dir/train.py -m x | train",
		"-m my.mod --lr 1":               "python3 -u -m my.mod --lr 1 | my.mod",
		"--module my.mod":                "python3 -u -m my.mod | my.mod",
		"--no-python train.py":           "train.py | train",
		"--no_python ./prog --no-python": "./prog --no-python | prog",
		"--run-path /x/script arg":       "python3 -u /x/script arg | python3",
		"--run-path --no-python /x.py":   "python3 -u /x.py | x",
		"-- python train.py":             "python train.py | train",
		"./prog train":                   "./prog train | prog",
		"-m -- python3 -u -m my.mod a":   "python3 -u -m my.mod a | python3",
		"-m -- my.mod a":                 "python3 -u -m my.mod a | my.mod",
		"-m my.mod -u -m x":              "python3 -u -m my.mod -u -m x | my.mod",
		"--run-path -- python3 -u /x a":  "python3 -u /x a | python3",
	} {
		o, args, err := options(t, nil, strings.Fields(line)...)
		if err != nil {
			t.Fatal(err)
		}
		command, run, err := o.command(args)
		if got := strings.Join(command, " ") + " | " + run; err != nil || got != want {
			t.Errorf("%s: %s, %v, want %s", line, got, err, want)
		}
	}
	o, args, err := options(t, nil, "-m", "--no-python", "x")
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := o.command(args); !errors.Is(err, launch.ErrConfig) || !strings.Contains(err.Error(), "exclude each other") {
		t.Errorf("error %v", err)
	}
	t.Setenv("PYTHON_EXEC", "/opt/python")
	if command, _, err := new(torchrunOptions).command([]string{"a.py"}); err != nil || command[0] != "/opt/python" {
		t.Errorf("%v, %v", command, err)
	}
}

func TestTorchrunEnvironment(t *testing.T) {
	for line, want := range map[string]string{
		"":                                                  "{default  127.0.0.1 0} []",
		"--role x --rdzv-id y --master-port 7":              "{x y 127.0.0.1 7} []",
		"--master-addr h --master-port 7":                   "{default  h 7} []",
		"--rdzv-endpoint h:7 --master-addr g":               "{default  h 7} []",
		"--rdzv-endpoint [::1]:7":                           "{default  ::1 7} []",
		"--rdzv-backend c10d":                               "{default  127.0.0.1 0} []",
		"--rdzv-backend c10d --local-addr l":                "{default  l 0} []",
		"--rdzv-backend c10d --rdzv-endpoint h":             "{default  127.0.0.1 0} [--rdzv-endpoint has no effect: a job on one node needs no rendezvous]",
		"--standalone --rdzv-id y":                          "{default  127.0.0.1 0} [--rdzv-id has no effect with --standalone]",
		"--local-addr l":                                    "{default  127.0.0.1 0} [--local-addr has no effect: a job on one node needs no rendezvous]",
		"--rdzv-conf timeout=3,is_host=1":                   "{default  127.0.0.1 0} [--rdzv-conf has no effect: a job on one node needs no rendezvous]",
		"--start-method forkserver":                         "{default  127.0.0.1 0} []",
		"--signals-to-handle sigint,SIGTERM,SIGQUIT,SIGHUP": "{default  127.0.0.1 0} []",

		"--rdzv-backend etcd-v2":      "error: --rdzv-backend etcd-v2: this trainer has static and c10d, which mean the same; leave it out",
		"--rdzv-endpoint h":           "error: --rdzv-endpoint h: want HOST:PORT",
		"--rdzv-endpoint h:p":         "error: port p: give one from 1 to 65535",
		"--rdzv-conf x":               `error: --rdzv-conf: "x": want KEY=VALUE`,
		"--rdzv-conf is_host=false":   "error: is_host=false",
		"--rdzv-conf rank=1":          "error: rank=1: the only node has rank 0",
		"--start-method thread":       "error: --start-method thread: give spawn, fork or forkserver",
		"--event-log-handler console": "error: --event-log-handler console: this trainer has no handlers of torch",
		"--signals-to-handle SIGUSR1": "error: --signals-to-handle SIGUSR1: this trainer handles SIGTERM,SIGINT,SIGHUP,SIGQUIT",
		"--master-port 65536":         "error: --master-port 65536: give a port from 1 to 65535",
		"--monitor-interval -1":       "error: --monitor-interval -1: give 0 or more",
	} {
		o, _, err := options(t, nil, strings.Fields(line)...)
		if err != nil {
			t.Fatal(line, err)
		}
		cfg, notes, err := o.torch(false)
		if says, fails := strings.CutPrefix(want, "error: "); fails {
			if !errors.Is(err, launch.ErrConfig) || !strings.Contains(err.Error(), says) {
				t.Errorf("%s: error %v, want %q", line, err, says)
			}
			continue
		}
		if got := fmt.Sprint(cfg, notes); err != nil || strings.ReplaceAll(got, "}[", "} [") != want {
			t.Errorf("%s: %s, %v, want %s", line, got, err, want)
		}
	}
}

// Timeouts of a rendezvous bound the waiting for nodes, unless a flag does.
func TestRendezvousConf(t *testing.T) {
	for line, want := range map[string]string{
		"": "10m0s 30s []",
		"--rdzv-conf join_timeout=60,last_call_timeout=5":    "1m0s 5s []",
		"--rdzv-conf join_timeout=60 --endpoint-wait 2m":     "2m0s 30s []",
		"--rdzv-conf timeout=3,is_host=1":                    "10m0s 30s [--rdzv-conf timeout has no effect: --node-timeout, --endpoint-wait and --last-call bound the waiting for nodes --rdzv-conf is_host",
		"--rdzv-conf join_timeout=0":                         "error: --rdzv-conf join_timeout=0: give a number of seconds above 0",
		"--rdzv-conf join_timeout":                           `error: --rdzv-conf: "join_timeout": want KEY=VALUE`,
		"--rdzv-conf join_timeout=9999999999":                "error: --rdzv-conf join_timeout=9999999999: give a number of seconds above 0, and at most 315360000",
		"--rdzv-conf last_call_timeout=99999999999999999999": "error: --rdzv-conf last_call_timeout=99999999999999999999: give",
	} {
		o, _, err := options(t, nil, strings.Fields(line)...)
		if err != nil {
			t.Fatal(line, err)
		}
		notes, err := o.conf(o.rdzvConf, o.asked)
		if says, fails := strings.CutPrefix(want, "error: "); fails {
			if !errors.Is(err, launch.ErrConfig) || !strings.Contains(err.Error(), says) {
				t.Errorf("%s: error %v, want %q", line, err, says)
			}
			continue
		}
		if got := fmt.Sprint(o.endpointWait, " ", o.lastCall, " ", notes); err != nil || !strings.HasPrefix(got, want) {
			t.Errorf("%s: %s, %v, want %s", line, got, err, want)
		}
	}
}

func TestNodes(t *testing.T) {
	slurm := map[string]string{"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[001-002]", "SLURM_LAUNCH_NODE_IPADDR": "9.9.9.9"}
	for _, c := range []struct {
		env  map[string]string
		line string
		want string
	}{
		{nil, "", "1:1 0  "},
		{nil, "--nnodes 1:1", "1:1 0  "},
		{slurm, "", "2:2 1 n001 SLURM_NNODES=2"},
		{slurm, "--nnodes 1", "1:1 0  "},
		{slurm, "--nnodes 4 --node-rank 3 --master-addr m", "4:4 3 m --nnodes 4"},
		{map[string]string{"SLURM_NNODES": "8", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}, "", "1:1 0  "},
		{map[string]string{"JOB_COMPLETION_INDEX": "2"}, "", "1:1 0  "},
		{map[string]string{"JOB_COMPLETION_INDEX": "2"}, "--nnodes 2:4", "2:4 2  --nnodes 2:4"},
		{map[string]string{"SLURM_NNODES": "2", "SLURM_STEP_NODELIST": "b,a", "SLURM_JOB_NODELIST": "c"}, "", "2:2 0 b SLURM_NNODES=2"},

		{map[string]string{"JOB_COMPLETION_INDEX": "4"}, "--nnodes 2:4", "2:4 4  --nnodes 2:4"},
		{nil, "--nnodes 2 --node-rank 2", "error: --node-rank 2: with 2 nodes give a number from 0 to 1"},

		{nil, "--nnodes 0", "error: --nnodes 0: give a number of nodes of 1 or more"},
		{nil, "--nnodes 3:2", "error: --nnodes 3:2: give"},
		{nil, "--nnodes x", "error: --nnodes x: give"},
		{map[string]string{"SLURM_NNODES": "two"}, "", "error: SLURM_NNODES=two: give"},
		{nil, "--node-rank 1", "error: --node-rank 1: the only node of a job has rank 0"},
		{nil, "--nnodes 2 --node-rank 2", "error: --node-rank 2: with 2 nodes give a number from 0 to 1"},
		{map[string]string{"JOB_COMPLETION_INDEX": "5"}, "--nnodes 2", "2:2 5  --nnodes 2"},
		{map[string]string{"SLURM_NODEID": "x"}, "--nnodes 2", "error: SLURM_NODEID=x: want the number"},
		{map[string]string{"SLURM_JOB_NODELIST": "n["}, "--nnodes 2", "error: SLURM_JOB_NODELIST: node list"},
	} {
		o, _, err := options(t, nil, strings.Fields(c.line)...)
		if err != nil {
			t.Fatal(err)
		}
		n, err := o.placed(func(name string) string { return c.env[name] })
		if says, fails := strings.CutPrefix(c.want, "error: "); fails {
			if !errors.Is(err, launch.ErrConfig) || !strings.Contains(err.Error(), says) {
				t.Errorf("%q with %v: error %v, want %q", c.line, c.env, err, says)
			}
			continue
		}
		said := n.said
		if n.max == 1 {
			said = ""
		}
		if got := fmt.Sprintf("%d:%d %d %s %s", n.min, n.max, n.rank, n.master, said); err != nil || got != c.want {
			t.Errorf("%q with %v: %s, %v, want %s", c.line, c.env, got, err, c.want)
		}
	}
}

// A flag for several nodes that has no effect is reported: nothing that a user gives is silently ignored.
func TestIneffectiveFlags(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"":                                                "",
		"--nproc 2":                                       "",
		"--preflight --node-timeout 5s":                   "--node-timeout has no effect: the job has one node\n--preflight has no effect: the job has one node",
		"--nnodes 1 --broadcast=false":                    "--broadcast has no effect: the job has one node",
		"--nnodes 2 --preflight":                          "",
		"--nnodes 2 --last-call 5s":                       "--last-call has no effect: the number of nodes is fixed; give --nnodes MIN:MAX",
		"--nnodes 2:3 --grow-interval 5s":                 "",
		"--nnodes 2 --domain rack1":                       "--domain has no effect: there are no replicas without --replicas",
		"--nnodes 2 --domain rack1 --replicas 1":          "",
		"--nnodes 3 --log-replica-dir d":                  "--log-replica-dir has no effect: nodes have no copy of the log without --log-replicas 3",
		"--nnodes 3 --log-replica-dir d --log-replicas 3": "",
	} {
		o, _, err := options(t, nil, strings.Fields(line)...)
		if err != nil {
			t.Fatal(err)
		}
		n, err := o.placed(func(string) string { return "" })
		if got := strings.Join(o.ineffective(n, o.asked), "\n"); err != nil || got != want {
			t.Errorf("%q: %q, %v, want %q", line, got, err, want)
		}
	}
}

func TestSlurmHosts(t *testing.T) {
	for list, want := range map[string]string{
		"x":                   "x",
		"n[001-003,7],x":      "n001 n002 n003 n7 x",
		"n[9-11]":             "n9 n10 n11",
		"n[09-11]":            "n09 n10 n11",
		"r[1-2]n[01-02]-ib,y": "r1n01-ib r1n02-ib r2n01-ib r2n02-ib y",
		"b,a":                 "b a",
		"n[5]":                "n5",
	} {
		got, err := slurmHosts(list)
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("%s: %v, %v, want %s", list, got, err, want)
		}
	}
	for list, says := range map[string]string{
		"":                      "an empty name",
		"a,":                    "an empty name",
		"n[1-2":                 "a [ without its ]",
		"n]":                    "a ] without its [",
		"n[3-1]":                `"3-1" is not a range`,
		"n[]":                   `"" is not a range`,
		"n[a]":                  `"a" is not a range`,
		"n[1-99999]":            "more than 65536 hosts",
		"a[1-300]b[1-300]":      "more than 65536 hosts",
		"n[1-4294967295]":       "more than 65536 hosts",
		"a[1-60000],b[1-60000]": "more than 65536 hosts",
	} {
		if got, err := slurmHosts(list); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %d hosts, %v, want %q", list, len(got), err, says)
		}
	}
}

func TestWorkersAndGPUs(t *testing.T) {
	four := []gpu.Device{{UUID: "GPU-0", Index: 0}, {UUID: "GPU-1", Index: 1}, {UUID: "GPU-2", Index: 2}, {UUID: "GPU-3", Index: 3}}
	mig := []gpu.Device{{UUID: "GPU-m", MIG: true, Instances: []gpu.Instance{{UUID: "MIG-1"}, {UUID: "MIG-2"}}}}
	lost := errors.New("device 2 is lost")
	for _, c := range []struct {
		line    string
		devices []gpu.Device
		problem error
		visible string // "unset" where it is
		want    string // workers, GPUs each, notes
	}{
		{"", nil, gpu.ErrNoDriver, "unset", "1 0 []"},
		{"--nproc 3", nil, gpu.ErrNoDriver, "0,1", "3 0 []"},
		{"--nproc cpu", nil, gpu.ErrNotBuilt, "unset", "6 0 []"},
		{"--nproc auto", nil, gpu.ErrNoDriver, "unset", "6 0 []"},
		{"--nproc auto", four, nil, "unset", "4 1 []"},
		{"--nproc auto", four, nil, "", "6 0 []"},
		{"--nproc gpu", four, nil, "unset", "4 1 []"},
		{"--nproc gpu", four, nil, "3,GPU-0", "2 1 []"},
		{"--nproc gpu", mig, nil, "unset", "2 1 []"},
		{"--nproc gpu", four[:3], lost, "unset", "3 1 [not all GPUs can be used: device 2 is lost]"},
		{"--nproc gpu --gpus-per-worker 2", four, nil, "unset", "2 2 []"},
		{"--nproc gpu --gpus-per-worker 0", four, nil, "unset", "4 0 []"},
		{"--nproc 2", four, nil, "unset", "2 2 []"},
		{"--nproc 3", four, nil, "unset", "3 1 []"},
		{"--nproc 1", mig, nil, "unset", "1 1 []"},
		{"--nproc 2 --gpus-per-worker 1", four, nil, "unset", "2 1 []"},
		{"--nproc 2 --gpus-per-worker 0", nil, lost, "unset", "2 0 []"},
		{"--nproc 5", four, nil, "unset", "5 0 [5 workers have 4 GPUs: none is assigned, and CUDA_VISIBLE_DEVICES is left as it is]"},
		{"--nproc 2", nil, lost, "unset", "2 0 [not all GPUs can be used: device 2 is lost]"},
		{"--nproc 2", four, nil, "9", "2 0 [not all GPUs can be used: CUDA_VISIBLE_DEVICES"},

		{"--nproc gpu", nil, gpu.ErrNoDriver, "unset", "error: --nproc gpu: no NVIDIA driver"},
		{"--nproc gpu", nil, nil, "unset", "error: --nproc gpu: no GPU found"},
		{"--nproc gpu", four, nil, "-1", "error: CUDA_VISIBLE_DEVICES hides them"},
		{"--nproc gpu", four, nil, "9", `error: "9" is no device of this machine`},
		{"--nproc gpu --gpus-per-worker 5", four, nil, "unset", "error: --gpus-per-worker 5: 4 GPUs are visible here"},
		{"--nproc 2 --gpus-per-worker 1", nil, gpu.ErrNoDriver, "unset", "error: --gpus-per-worker 1: no NVIDIA driver"},
		{"--nproc 2 --gpus-per-worker 1", four, lost, "unset", "error: --gpus-per-worker 1: device 2 is lost"},
		{"--nproc 3 --gpus-per-worker 2", four, nil, "unset", "error: 4 are visible here: start fewer workers"},
		{"--gpus-per-worker -2", four, nil, "unset", "error: --gpus-per-worker -2: give a number of 0 or more, or auto"},
		{"--nproc 0", four, nil, "unset", "error: --nproc 0: give a number of 1 or more, gpu, cpu or auto"},
		{"--nproc xpu", four, nil, "unset", "error: --nproc xpu: give"},
		{"--backend mpi", nil, nil, "unset", `error: --backend: no backend "mpi" is registered; choose one of none, process_group, tensorpipe, torch`},
	} {
		o, _, err := options(t, nil, strings.Fields(c.line)...)
		if err != nil {
			t.Fatal(err)
		}
		m := machine{
			cores: 6, list: func(context.Context) ([]gpu.Device, error) { return c.devices, c.problem },
			visible: func() (string, bool) { return c.visible, c.visible != "unset" },
		}
		n, cfg, notes, err := o.resolve(t.Context(), m, o.nproc)
		if says, fails := strings.CutPrefix(c.want, "error: "); fails {
			if !errors.Is(err, launch.ErrConfig) || !strings.Contains(err.Error(), says) {
				t.Errorf("%q of %d: error %v, want %q", c.line, len(c.devices), err, says)
			}
			continue
		}
		if got := fmt.Sprint(n, " ", cfg.GPUsPerWorker, " ", notes); err != nil || !strings.HasPrefix(got, c.want) {
			t.Errorf("%q of %d: %s, %v, want %s", c.line, len(c.devices), got, err, c.want)
		}
	}
}

func TestShareDevicesFlag(t *testing.T) {
	none := machine{cores: 1, list: func(context.Context) ([]gpu.Device, error) { return nil, gpu.ErrNoDriver }, visible: func() (string, bool) { return "", false }}
	for _, c := range []struct{ line, env, want string }{
		{"", "", "backend"},
		{"--share-devices", "", "true"},
		{"--share-devices=false", "", "false"},
		{"--share-devices", "0", "false"},
		{"--share-devices=false", "1", "true"},
		{"", "1", "true"},
	} {
		t.Setenv("CKPTSTORE_SHARE_DEVICES", c.env)
		o, _, err := options(t, nil, strings.Fields(c.line)...)
		if err != nil {
			t.Fatal(err)
		}
		_, cfg, _, err := o.resolve(t.Context(), none, o.nproc)
		got := "backend"
		if cfg.ShareDevices != nil {
			got = fmt.Sprint(*cfg.ShareDevices)
		}
		if err != nil || got != c.want {
			t.Errorf("%q with %q: %s, %v, want %s", c.line, c.env, got, err, c.want)
		}
	}
	t.Setenv("CKPTSTORE_SHARE_DEVICES", "perhaps")
	o, _, _ := options(t, nil)
	if _, _, _, err := o.resolve(t.Context(), none, "1"); !errors.Is(err, launch.ErrConfig) || !strings.Contains(err.Error(), `CKPTSTORE_SHARE_DEVICES is "perhaps"`) {
		t.Errorf("error %v", err)
	}
}

// The trainer has, or rejects, every flag of torchrun's environment.
func TestPETNames(t *testing.T) {
	f := pflag.NewFlagSet("run", pflag.ContinueOnError)
	new(torchrunOptions).flags(f)
	f.VisitAll(func(flag *pflag.Flag) {
		if flag.Name != "nproc" && !slices.Contains(petFlags, flag.Name) {
			t.Errorf("--%s has no %s", flag.Name, petName(flag.Name))
		}
	})
}
