package trainer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// nodesOptions configure a job over several nodes.
type nodesOptions struct {
	nodeTimeout, endpointWait, lastCall, growInterval time.Duration
	logOptions

	replicas        int
	maxNodeFailures int
	preflight       bool
	broadcast       bool
	coordinatorOnly bool
	replicaRate     string
	domain          string
}

func (o *nodesOptions) flags(f *pflag.FlagSet) {
	f.DurationVar(&o.nodeTimeout, "node-timeout", 10*time.Second, "silence after which a node is lost; a node that gets no answer kills its workers after half of it")
	f.DurationVar(&o.endpointWait, "endpoint-wait", 10*time.Minute, "how long to wait for the other nodes, and for the endpoint")
	f.IntVar(&o.maxNodeFailures, "max-node-failures", 0, "failures in a row of one node's ranks, while those of other nodes do not fail and nothing is committed, after which the node is excluded and a spare takes its place, or the job waits for one; also losses of one node in a row, less than an hour apart, while no other node is lost. 0: no node is ever excluded (default: failures and losses exclude no node; what --preflight, a GPU or a growth finds excludes a node that the job can do without)")
	f.BoolVar(&o.preflight, "preflight", false, "before the first group, for up to 10 s, measure the network of all nodes and have each examine its devices, shared memory, disk and clock; exclude a bad node if a spare is there; with --max-node-failures 0, only warn")
	f.IntVar(&o.logReplicas, "log-replicas", 1, "copies of the log of a directory, on the first nodes of the job: 1, or 3 (one may be lost)")
	f.BoolVar(&o.broadcast, "broadcast", true, "in a load over several nodes, read from the store once what several nodes want, and pass it on between them")
	f.StringVar(&o.logReplicaDir, "log-replica-dir", "", "with --log-replicas 3: directory of this node's copy (default: STORE/log.INDEX)")
	f.BoolVar(&o.coordinatorOnly, "coordinator-only", false, "this node coordinates the job and has no workers; --nnodes counts it. With --log-replicas 3, the group survives its loss: another node coordinates it")
	f.IntVar(&o.replicas, "replicas", 0, "how many other nodes keep a copy of each sealed slot in memory, 0 to 3: a save that all ranks have sealed survives the loss of so many nodes")
	f.StringVar(&o.replicaRate, "replica-rate", "256MiB", "most bytes that a node sends to its replica in a second, such as 1GiB; 0 for any number")
	f.StringVar(&o.domain, "domain", "", "failure domain of this node, such as its rack: replicas are kept in another one")
	f.DurationVar(&o.lastCall, "last-call", 30*time.Second, "with MIN:MAX, how long to wait for more nodes than MIN")
	f.DurationVar(&o.growInterval, "grow-interval", 5*time.Minute, "with MIN:MAX, how long a group trains before its workers are asked to save and end for nodes that have joined; it must have committed a checkpoint. 0 for never: such nodes are spares")
}

// maxReplicas bounds --replicas: each copy costs as much memory and network as the first.
const maxReplicas = 3

// replication sets how the job replicates slots.
func (o *nodesOptions) replication(cfg *launch.Config, n placement) error {
	if o.replicas < 0 || o.replicas > maxReplicas {
		return fmt.Errorf("%w: --replicas %d: give 0 to %d", launch.ErrConfig, o.replicas, maxReplicas)
	}
	if o.replicas > 0 && n.max == 1 {
		return fmt.Errorf("%w: --replicas %d: a job on one node has no other node for the copies; give --nnodes too, or leave it out", launch.ErrConfig, o.replicas)
	}
	if o.replicas >= n.max && n.max > 1 {
		return fmt.Errorf("%w: --replicas %d: the job has at most %d nodes, and each copy is on another node; give --nnodes %d or more", launch.ErrConfig, o.replicas, n.max, o.replicas+1)
	}
	if len(o.domain) > maxDomain {
		return fmt.Errorf("%w: --domain has %d bytes: give at most %d", launch.ErrConfig, len(o.domain), maxDomain)
	}
	cfg.Replicas, cfg.Broadcast = o.replicas, o.broadcast
	if o.replicaRate == "0" {
		return nil
	}
	rate, err := staging.ParseMemory(o.replicaRate)
	if err != nil || rate.Bytes == 0 {
		return fmt.Errorf("%w: --replica-rate %q: give a size such as 256MiB, or 0", launch.ErrConfig, o.replicaRate)
	}
	cfg.ReplicaRate = rate.Bytes
	return nil
}

// ineffective reports the flags that were given and have no effect in a job of these nodes.
func (o *nodesOptions) ineffective(n placement, asked func(flag string) bool) (notes []string) {
	note := func(because string, flags ...string) {
		for _, flag := range flags {
			if asked(flag) {
				notes = append(notes, fmt.Sprintf("--%s has no effect: %s", flag, because))
			}
		}
	}
	if n.max == 1 {
		note("the job has one node", "node-timeout", "endpoint-wait", "last-call", "grow-interval", "max-node-failures", "preflight", "broadcast", "replica-rate", "domain", "log-replica-dir")
		return notes
	}
	if n.min == n.max {
		note("the number of nodes is fixed; give --nnodes MIN:MAX", "last-call", "grow-interval")
	}
	if o.replicas == 0 {
		note("there are no replicas without --replicas", "replica-rate", "domain")
	}
	if o.logReplicas == 1 {
		note("nodes have no copy of the log without --log-replicas 3", "log-replica-dir")
	}
	return notes
}

// conf takes the timeouts of --rdzv-conf, in seconds, that this trainer has too. A flag of its
// own takes precedence. Notes report the other settings.
func (o *nodesOptions) conf(text string, asked func(flag string) bool) (notes []string, err error) {
	settings, err := confOf(text)
	if err != nil {
		return nil, fmt.Errorf("%w: --rdzv-conf: %w", launch.ErrConfig, err)
	}
	for _, of := range settings {
		key, value := of[0], of[1]
		flag, limit := "", (*time.Duration)(nil)
		switch key {
		case "join_timeout":
			flag, limit = "endpoint-wait", &o.endpointWait
		case "last_call_timeout":
			flag, limit = "last-call", &o.lastCall
		default:
			notes = append(notes, "--rdzv-conf "+key+" has no effect: --node-timeout, --endpoint-wait and --last-call bound the waiting for nodes")
			continue
		}
		seconds, err := strconv.Atoi(value)
		if err != nil || seconds < 1 || seconds > int(session.MaxDuration/time.Second) {
			return nil, fmt.Errorf("%w: --rdzv-conf %s=%s: give a number of seconds above 0, and at most %d", launch.ErrConfig, key, value, int(session.MaxDuration/time.Second))
		}
		if !asked(flag) {
			*limit = time.Duration(seconds) * time.Second
		}
	}
	return notes, nil
}

// endpoint returns where the nodes of a job meet, HOST:PORT: --rdzv-endpoint, or else the
// master's address.
func (o *torchrunOptions) endpoint(n placement, getenv func(string) string) (string, error) {
	host, port := "", defaultEndpointPort
	switch {
	case o.rdzvEndpoint != "":
		h, p, err := net.SplitHostPort(o.rdzvEndpoint)
		if err != nil {
			h, p = o.rdzvEndpoint, strconv.Itoa(defaultEndpointPort)
		}
		number, err := strconv.Atoi(p)
		if h == "" || err != nil || number < 1 || number > 65535 {
			return "", fmt.Errorf("%w: --rdzv-endpoint %s: want HOST:PORT, the address of one of the nodes and a free port there", launch.ErrConfig, o.rdzvEndpoint)
		}
		host, port = h, number
	case n.master != "":
		host = n.master
		if o.masterPort != 0 {
			port = o.masterPort
		} else if job, err := strconv.Atoi(getenv(slurmJob)); err == nil && job > 0 {
			port = slurmPorts + job%slurmPortCount
		}
	default:
		return "", fmt.Errorf("%w: %s: the nodes need a place to meet: give --rdzv-endpoint HOST:PORT on each node, with the address of one of them", launch.ErrConfig, n.said)
	}
	return net.JoinHostPort(host, strconv.Itoa(port)), nil
}

// taken reports whether another process listens at an endpoint of this machine.
func taken(ctx context.Context, endpoint string) bool {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", endpoint)
	if err != nil {
		return errors.Is(err, syscall.EADDRINUSE)
	}
	_ = l.Close() // a probe
	return false
}
