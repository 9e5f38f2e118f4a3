package trainer

import (
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/ckptstore/ckptstore/internal/launch"
)

// torchrunOptions are torchrun's flags, with torchrun's meaning.
type torchrunOptions struct {
	nproc, nnodes                                string
	nodeRank                                     int
	rdzvBackend, rdzvEndpoint, rdzvID, rdzvConf  string
	standalone                                   bool
	masterAddr, localAddr                        string
	masterPort                                   int
	role, startMethod, eventLogHandler, toHandle string
	monitorInterval                              float64
	shutdownTimeout                              int
	module, noPython, runPath                    bool
	asked                                        func(flag string) bool // whether it was given on the command line or by PET_NAME
	literal                                      bool                   // the command follows --
}

const defaultSignals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

// torchrunHelp is the part of the help that concerns torchrun's users.
const torchrunHelp = `A torchrun command line works unchanged: write trainer run in place of torchrun, with
-, _ and PET_NAME as there. A command that ends in .py is run by $PYTHON_EXEC,
else python3. Unlike torchrun, --max-restarts defaults to 3, and exits are noticed at
once whatever --monitor-interval is.

With --nnodes above 1, start the trainer on each node, with the same command and a
store that all nodes share. The trainer that has the address of --rdzv-endpoint
coordinates the job: it alone decides, and the others follow it. If a node is silent
for --node-timeout, the group restarts without it, or with the node that takes its
place. A node that gets no answer kills its workers after half of that time, so that
two groups never overlap. If the coordinating node is lost, the job ends, and the next
job of the run continues it; with --log-replicas 3, another node takes its place.`

func (o *torchrunOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.nproc, "nproc", "1", "workers: a number, gpu (one a device), cpu (one a core), or auto (devices, or else cores)")
	f.StringVar(&o.nproc, "nproc-per-node", "1", "torchrun's name of --nproc")
	f.StringVar(&o.nnodes, "nnodes", "", "nodes of the job, N or MIN:MAX: start the trainer on each (default: $SLURM_NNODES, or 1)")
	f.IntVar(&o.nodeRank, "node-rank", 0, "number of this node (default: $SLURM_NODEID or $JOB_COMPLETION_INDEX)")
	f.BoolVarP(&o.module, "module", "m", false, "run a Python module, as python -m")
	f.BoolVar(&o.noPython, "no-python", false, "run the command itself, whatever its name ends in")
	f.BoolVar(&o.runPath, "run-path", false, "run the command as a Python script, whatever its name ends in")
	f.StringVar(&o.role, "role", "default", "ROLE_NAME of the workers")
	f.StringVar(&o.masterAddr, "master-addr", "127.0.0.1", "MASTER_ADDR of the workers")
	f.IntVar(&o.masterPort, "master-port", 0, "MASTER_PORT of the workers (default: a free port, another for each attempt)")
	f.BoolVar(&o.standalone, "standalone", false, "a job on one node, which is the default: the --rdzv flags are ignored")
	f.StringVar(&o.rdzvBackend, "rdzv-backend", "static", "static or c10d; a job on one node needs no rendezvous")
	f.StringVar(&o.rdzvEndpoint, "rdzv-endpoint", "", "HOST:PORT where the nodes of the job meet: an address of one of them. On one node, with the static backend, MASTER_ADDR and MASTER_PORT")
	f.StringVar(&o.rdzvID, "rdzv-id", "", "TORCHELASTIC_RUN_ID of the workers (default: the run's name)")
	f.StringVar(&o.rdzvConf, "rdzv-conf", "", "KEY=VALUE,...: timeouts of a rendezvous, which a job on one node does not need")
	f.StringVar(&o.localAddr, "local-addr", "", "address of this node for the others (default: that of its connection to the endpoint); on one node, with the c10d backend, MASTER_ADDR")
	f.Float64Var(&o.monitorInterval, "monitor-interval", 0.1, "accepted: exits of workers are noticed at once")
	f.StringVar(&o.startMethod, "start-method", "spawn", "spawn, fork or forkserver: accepted, a command is always executed")
	f.StringVar(&o.eventLogHandler, "event-log-handler", "null", "null: events are in the store's log")
	f.StringVar(&o.toHandle, "signals-to-handle", defaultSignals, "signals that end the job; only these are accepted")
	f.IntVar(&o.shutdownTimeout, "shutdown-timeout", 0, "torchrun's name of --grace, in seconds")
	for _, name := range []string{"nproc-per-node", "monitor-interval", "start-method", "event-log-handler", "signals-to-handle", "shutdown-timeout"} {
		if err := f.MarkHidden(name); err != nil {
			panic(err) // a name that is not a flag of this command
		}
	}
}

// petFlags are the flags of torchrun that have a PET_NAME in the environment.
var petFlags = []string{
	"nnodes", "nproc-per-node", "node-rank", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "standalone",
	"max-restarts", "monitor-interval", "start-method", "event-log-handler", "role", "module", "no-python", "run-path",
	"master-addr", "master-port", "local-addr", "signals-to-handle", "shutdown-timeout",
	"log-dir", "redirects", "tee", "local-ranks-filter", "log-line-prefix-template",
	"duplicate-stdout-filters", "duplicate-stderr-filters", "virtual-local-rank",
}

// sameFlag maps flags of torchrun to our flags of the same meaning.
var sameFlag = map[string]string{"nproc-per-node": "nproc", "shutdown-timeout": "grace"}

func petName(flag string) string {
	return "PET_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// defaults sets the flags that were not given from the environment.
func (o *torchrunOptions) defaults(f *pflag.FlagSet, lookup func(string) (string, bool)) error {
	o.asked = func(flag string) bool { return f.Changed(flag) || sameFlag[flag] != "" && f.Changed(sameFlag[flag]) }
	o.literal = f.ArgsLenAtDash() == 0
	for _, name := range petFlags {
		value, set := lookup(petName(name))
		if !set || o.asked(name) {
			continue
		}
		flag := f.Lookup(name)
		if flag == nil {
			if value == "" || value == "0" {
				continue // torchrun's default
			}
			return fmt.Errorf("%w: %s is %q, and this trainer has no --%s: unset it", launch.ErrConfig, petName(name), value, name)
		}
		if flag.Value.Type() == "bool" {
			n, err := strconv.Atoi(strings.TrimSpace(value))
			if err != nil {
				return fmt.Errorf("%w: %s is %q: set it to 1 or 0, or unset it", launch.ErrConfig, petName(name), value)
			}
			value = strconv.FormatBool(n != 0)
		}
		if err := f.Set(name, value); err != nil {
			return fmt.Errorf("%w: %s: %w: correct or unset it", launch.ErrConfig, petName(name), err)
		}
	}
	if !f.Changed("grace") && f.Changed("shutdown-timeout") {
		if o.shutdownTimeout <= 0 {
			return fmt.Errorf("%w: --shutdown-timeout %d: give a number of seconds above 0", launch.ErrConfig, o.shutdownTimeout)
		}
		return f.Set("grace", fmt.Sprint(o.shutdownTimeout, "s"))
	}
	return nil
}

// torch returns the settings for the workers' environment. Notes report flags
// that have no effect on one node.
func (o *torchrunOptions) torch(many bool) (cfg launch.TorchConfig, notes []string, err error) {
	bad := func(format string, args ...any) (launch.TorchConfig, []string, error) {
		return cfg, nil, fmt.Errorf("%w: %s", launch.ErrConfig, fmt.Sprintf(format, args...))
	}
	note := func(flag string) {
		notes = append(notes, "--"+flag+" has no effect: a job on one node needs no rendezvous")
	}
	switch {
	case o.masterPort < 0 || o.masterPort > 65535:
		return bad("--master-port %d: give a port from 1 to 65535, or leave it out for a free one", o.masterPort)
	case o.monitorInterval < 0:
		return bad("--monitor-interval %v: give 0 or more; exits are noticed at once whatever it is", o.monitorInterval)
	case !slices.Contains([]string{"spawn", "fork", "forkserver"}, o.startMethod):
		return bad("--start-method %s: give spawn, fork or forkserver; a command is executed in any case", o.startMethod)
	case o.eventLogHandler != "null":
		return bad("--event-log-handler %s: this trainer has no handlers of torch; see ckptstore events, and leave the flag out", o.eventLogHandler)
	case !sameList(o.toHandle, defaultSignals):
		return bad("--signals-to-handle %s: this trainer handles %s; leave the flag out", o.toHandle, defaultSignals)
	}
	cfg = launch.TorchConfig{Role: o.role, MasterAddr: o.masterAddr, MasterPort: o.masterPort}
	if o.standalone {
		for _, flag := range []string{"rdzv-backend", "rdzv-endpoint", "rdzv-id"} {
			if o.asked(flag) {
				notes = append(notes, "--"+flag+" has no effect with --standalone")
			}
		}
	} else if o.asked("rdzv-id") {
		cfg.RunID = o.rdzvID
	}
	if !slices.Contains([]string{"static", "c10d"}, o.rdzvBackend) {
		return bad("--rdzv-backend %s: this trainer has static and c10d, which mean the same; leave it out", o.rdzvBackend)
	}
	if many {
		// The endpoint is the trainers'; the workers' master is on the node of rank 0.
		cfg.MasterAddr, cfg.MasterPort = "", 0
		return cfg, notes, nil
	}
	if err := o.checkConf(); err != nil {
		return bad("--rdzv-conf: %s", err)
	}
	if o.rdzvConf != "" {
		note("rdzv-conf")
	}
	switch {
	case o.rdzvBackend == "static" && !o.standalone:
		if o.localAddr != "" {
			note("local-addr")
		}
		if o.rdzvEndpoint == "" {
			return cfg, notes, nil
		}
		host, port, err := endpoint(o.rdzvEndpoint)
		if err != nil {
			return bad("--rdzv-endpoint %s: %s", o.rdzvEndpoint, err)
		}
		cfg.MasterAddr, cfg.MasterPort = host, port
	case o.rdzvBackend == "c10d" || o.standalone:
		if o.rdzvEndpoint != "" && !o.standalone {
			note("rdzv-endpoint")
		}
		if o.localAddr != "" {
			cfg.MasterAddr = o.localAddr
		}
	}
	return cfg, notes, nil
}

func sameList(a, b string) bool {
	sorted := func(list string) []string {
		names := strings.Split(strings.ToUpper(strings.ReplaceAll(list, " ", "")), ",")
		slices.Sort(names)
		return slices.Compact(names)
	}
	return slices.Equal(sorted(a), sorted(b))
}

func endpoint(text string) (host string, port int, err error) {
	host, number, err := net.SplitHostPort(text)
	if err != nil || host == "" {
		return "", 0, fmt.Errorf("want HOST:PORT, the address at which rank 0 is to listen")
	}
	port, err = strconv.Atoi(number)
	if err != nil || port < 0 || port > 65535 {
		return "", 0, fmt.Errorf("port %s: give one from 1 to 65535, or 0 for a free one", number)
	}
	return host, port, nil
}

// checkConf rejects a rendezvous configuration under which torchrun would wait
// for other nodes.
func (o *torchrunOptions) checkConf() error {
	settings, err := confOf(o.rdzvConf)
	if err != nil {
		return err
	}
	for _, of := range settings {
		key, value := of[0], of[1]
		switch {
		case key == "is_host" && slices.Contains([]string{"0", "false", "f", "no", "n"}, strings.ToLower(value)):
			return fmt.Errorf("is_host=%s: on one node this one is the host; leave it out", value)
		case key == "rank" && value != "0":
			return fmt.Errorf("rank=%s: the only node has rank 0; leave it out", value)
		}
	}
	return nil
}

// confOf returns the keys and values of a rendezvous configuration.
func confOf(text string) (settings [][2]string, err error) {
	if text == "" {
		return nil, nil
	}
	for _, pair := range strings.Split(text, ",") {
		key, value, ok := strings.Cut(strings.TrimSpace(pair), "=")
		if !ok || key == "" {
			return nil, fmt.Errorf("%q: want KEY=VALUE,KEY=VALUE", pair)
		}
		settings = append(settings, [2]string{key, value})
	}
	return settings, nil
}

// command returns the workers' command line, and a name for the run.
func (o *torchrunOptions) command(args []string) (command []string, run string, err error) {
	python := []string{or(os.Getenv("PYTHON_EXEC"), "python3"), "-u"}
	if o.literal && (o.module || o.runPath) && executed(args, o.module) {
		return args, defaultRun(args), nil
	}
	switch {
	case o.runPath:
		command = append(python, args...)
	case o.module && o.noPython:
		return nil, "", fmt.Errorf("%w: --module and --no-python exclude each other; leave one out", launch.ErrConfig)
	case o.module:
		return append(append(python, "-m"), args...), args[0], nil
	case !o.noPython && strings.HasSuffix(args[0], ".py"):
		command = append(python, args...)
	default:
		command = args
	}
	return command, defaultRun(command), nil
}

// executed reports whether this trainer has already derived a command from a
// module or script. A job launched again from its log has the derived command,
// and the same flags.
func executed(args []string, module bool) bool {
	if module {
		return len(args) > 3 && args[1] == "-u" && args[2] == "-m"
	}
	return len(args) > 2 && args[1] == "-u"
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}
