package trainer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/backend"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// maxDomain bounds the name of a failure domain in bytes.
const maxDomain = 256

// listenPeers listens for the requests of other nodes: replicas, measurements, and what they take
// in loads; nil if the job has none of them.
func (o runOptions) listenPeers(ctx context.Context, cfg launch.Config, endpoint string) (*nodes.Peers, error) {
	if cfg.Standby || cfg.Replicas == 0 && !o.preflight && !o.broadcast {
		return nil, nil
	}
	host := o.localAddr
	if host == "" {
		var err error
		if host, err = nodes.LocalAddress(ctx, endpoint); err != nil { // its name is not known yet
			cfg.Logger.Info("serving other nodes at all addresses", "because", err)
		}
	}
	return nodes.ListenPeers(ctx, host, cfg.Logger)
}

// The port of an endpoint that is given without one: torchrun's.
const defaultEndpointPort = 29400

// slurmPorts is the first of the ports that jobs of Slurm use, by their numbers, so that
// two jobs may share a machine.
const slurmPorts, slurmPortCount = 20000, 10000

// errTaken reports that another process listens at the endpoint.
var errTaken = errors.New("another process listens at the endpoint")

// welcome is what the coordinating trainer tells the others of their job.
type welcome struct {
	Run         string         `json:"run"`
	Job         string         `json:"job"`
	Config      map[string]any `json:"config,omitempty"`
	SaveTimeout time.Duration  `json:"save_timeout"`
	Drain       time.Duration  `json:"drain_timeout"`
	Grace       time.Duration  `json:"grace"`
	Collective  time.Duration  `json:"collective_timeout"`
	Strict      bool           `json:"strict_replicas,omitempty"`
	// Standby is set if one node of the job takes no ranks.
	Standby bool `json:"standby,omitempty"`
	// RunID is the --rdzv-id of the coordinating trainer; empty: it has none.
	RunID string `json:"run_id,omitempty"`
}

// expects returns an error if the job at an endpoint is not the one for which the user has started this trainer, as
// where two jobs were given one endpoint.
func (o runOptions) expects(job welcome, at string) error {
	flag, want, has := "", "", ""
	switch {
	case o.asked("name") && o.name != job.Run:
		flag, want, has = "--name", o.name, job.Run
	case o.asked("rdzv-id") && job.RunID != "" && o.rdzvID != job.RunID:
		flag, want, has = "--rdzv-id", o.rdzvID, job.RunID
	default:
		return nil
	}
	return fmt.Errorf("%w: join the job at %s: it has %s %s, and this trainer was started with %s: give each job its own endpoint, and all nodes of a job the same %s",
		launch.ErrConfig, at, flag, has, want, flag)
}

// self describes this node to the others.
func (o runOptions) self(n placement, cfg launch.Config) nodes.Node {
	node := nodes.Node{Index: -1, Procs: len(cfg.Local()), Version: release, Command: commandDigest(cfg.Command), Address: o.localAddr, Domain: o.domain, Standby: cfg.Standby, Nodes: n.count()}
	cfg.Peers.Declare(&node)
	node.Keeps = cfg.Peers != nil && cfg.Replicas > 0
	if n.ranked {
		node.Index, node.Key = n.rank, fmt.Sprint("index ", n.rank)
	}
	return node
}

// commandDigest identifies a command and its scripts.
func commandDigest(command []string) string {
	h := sha256.New()
	for _, arg := range command {
		_, _ = io.WriteString(h, arg+"\x00") // a hash takes everything
		if strings.HasSuffix(arg, ".py") {
			if text, err := os.ReadFile(arg); err == nil {
				_, _ = h.Write(text)
			}
		}
	}
	return hex.EncodeToString(h.Sum(nil))
}

// joinDir is where the coordinating trainer of a job leaves its address, for nodes that
// share the store's directory.
func joinDir(dir string) string { return filepath.Join(dir, "join") }

// runMany runs this node's part of a job over several nodes. The trainer that has the
// endpoint's address coordinates; the others follow it.
func (o runOptions) runMany(ctx context.Context, cfg launch.Config, n placement) error {
	if !slices.Contains([]string{"", "none", backend.Torch}, cfg.Backend) {
		return fmt.Errorf("%w: --backend %s: hooks of a backend see the workers of one node; leave --backend out, or use --nnodes 1", launch.ErrConfig, cfg.Backend)
	}
	at, err := o.endpoint(n, os.Getenv)
	if err != nil {
		return err
	}
	if o.token, err = jobToken(o.store); err != nil {
		return err
	}
	if cfg.Peers, err = o.listenPeers(ctx, cfg, at); err != nil {
		return err
	}
	defer func() { _ = cfg.Peers.Close() }() // nothing is sent any more
	if o.logReplicas == 1 {
		return o.meet(ctx, cfg, n, at)
	}
	return o.withPeers(ctx, cfg, n, at)
}

// jobToken returns the token by which the trainers of a job trust each other: that for the server of the store.
// Those of a store that is a directory have one in a file there.
func jobToken(location string) (string, error) {
	if !strings.Contains(location, "://") {
		return "", nil
	}
	token, _, err := store.AccessFromEnv().Client()
	if err == nil && token == "" {
		err = fmt.Errorf("%w: the trainers of several nodes trust each other by a token, if the store is at a URL: set $%s to the same one on each node, or $%s to a file with it",
			launch.ErrConfig, store.EnvToken, store.EnvTokenFile)
	}
	return token, err
}

// meet coordinates the job, or follows the trainer that does.
func (o runOptions) meet(ctx context.Context, cfg launch.Config, n placement, at string) error {
	for {
		if now := o.elsewhere(ctx, at); now != at {
			return o.follow(ctx, cfg, n, now)
		}
		if nodes.IsHere(ctx, at) && !taken(ctx, at) {
			if err := o.coordinate(ctx, cfg, n, at); !errors.Is(err, errTaken) {
				return err
			} // another trainer of this machine was faster
		}
		if cfg.Standby && !nodes.IsHere(ctx, at) {
			return fmt.Errorf("%w: --coordinator-only is for the node where the nodes meet, and %s is another one; give that node's address as --rdzv-endpoint, or leave the flag out", launch.ErrConfig, at)
		}
		if err := o.follow(ctx, cfg, n, at); !errors.Is(err, errHere) {
			return err
		}
		cfg.Logger.Info("endpoint is an address of this node by now", "endpoint", at)
	}
}

// coordinate runs the job from this node.
func (o runOptions) coordinate(ctx context.Context, cfg launch.Config, n placement, at string) (err error) {
	url := strings.Contains(o.store, "://")
	if err := o.unreplicated(n); err != nil {
		return err
	}
	return o.opened(ctx, cfg, store.Options{Location: o.store, Patience: o.wait, Logger: cfg.Logger}, func(ctx context.Context, st *store.Store, cfg launch.Config) (err error) {
		hello, err := json.Marshal(welcome{
			Run: cfg.Run, Job: cfg.Job, Config: cfg.TrialConfig, SaveTimeout: cfg.SaveTimeout, Drain: cfg.DrainTimeout, Grace: cfg.Grace, Collective: cfg.Collective,
			Strict: cfg.StrictReplicas, Standby: cfg.Standby || o.beside, RunID: cfg.Torch.RunID,
		})
		if err != nil {
			return err
		}
		hold := holdRun
		if o.succeeding != nil {
			// No node is invited before: a coordinator that is only slow keeps its nodes.
			var release func() error
			if hold, release, err = o.outlast(ctx, st, cfg); err != nil {
				return err
			}
			defer func() { _ = release() }() // of the lease that leased did not release
		}
		cfg.Contact = &process.Contact{}
		listen := nodes.EndpointConfig{
			Address: at, Token: o.token, Job: cfg.Job, Run: cfg.Run, Store: st.ID, Version: release,
			Min: n.min, Max: n.max, Self: o.self(n, cfg), Timeout: o.nodeTimeout, Welcome: hello, Logger: cfg.Logger,
			Ticked: cfg.Contact.Answered, Succeeds: o.living != "",
		}
		if cfg.Standby || o.beside { // the groups are those of the others
			listen.Min, listen.Max = max(1, n.min-1), n.max-1
		}
		if cfg.Standby && o.logReplicas > 1 {
			listen.Verify = func(ctx context.Context) error { return st.Holds(ctx, cfg.Run, cfg.Job) }
		}
		if listen.Excluded, err = o.inherited(ctx, st, cfg.Run); err != nil {
			return err
		}
		if !url {
			listen.Dir, listen.Token = joinDir(st.Dir()), ""
		}
		endpoint, err := nodes.Listen(ctx, listen)
		if errors.Is(err, syscall.EADDRINUSE) && o.succeeding != nil {
			// Another job may have the port here. This node has the lease, and the others learn of its port by the
			// announcement.
			endpoint, at, err = listenElsewhere(ctx, listen)
		}
		if errors.Is(err, syscall.EADDRINUSE) {
			return errTaken
		}
		if err != nil {
			return err
		}
		defer func() {
			reason, code := "done", 0
			if err != nil {
				reason, code = err.Error(), exitCode(err)
			}
			if o.deserts(err) {
				err = errors.Join(err, endpoint.Desert())
				return
			}
			end, cancel := context.WithTimeout(context.WithoutCancel(ctx), o.nodeTimeout)
			defer cancel()
			if lost := endpoint.End(end, session.Beginning(reason, session.MaxMessage), code); lost != nil {
				cfg.Logger.Warn("nodes not told of the job's end", "error", lost)
			}
			err = errors.Join(err, endpoint.Close())
		}()
		endpoint.Handle("POST /v1/store/{door}", tunnelTo(st))
		if !url {
			endpoint.ServeProbes(listen.Dir, cfg.Logger)
		}
		cfg.Preflight = o.preflight
		cfg.MaxNodeFailures, cfg.Exclude = o.maxNodeFailures, exclusion(o.maxNodeFailures, o.asked("max-node-failures"))
		if o.logReplicas > 1 {
			cfg.LogCopies = o.logReplicas
		}
		if o.logReplicas > 1 && (cfg.Standby || o.beside || o.hadStandby(ctx, st, cfg.Run)) {
			cfg.Survival = st.Living(cfg.Run)
		}
		cfg.Endpoint, cfg.GatherTimeout, cfg.LastCall, cfg.GrowInterval = endpoint, o.endpointWait, o.lastCall, o.growInterval
		cfg.Logger.Info("waiting for nodes", "endpoint", at, "least", n.min, "most", n.max)
		return leased(ctx, st, cfg, hold, func(ctx context.Context) error {
			withdraw, err := o.announce(cfg, n, at)
			if err != nil {
				return err
			}
			defer withdraw()
			if o.living != "" {
				cfg.Coordinates = func() { *o.took = true }
				return runLeased(ctx, st, cfg, o.parts.Storage, func(ctx context.Context, cfg launch.Config, store session.Store) error {
					return launch.Resume(ctx, cfg, store, o.living)
				})
			}
			return runLeased(ctx, st, cfg, o.parts.Storage, launch.Run)
		})
	})
}

// deserts reports whether the nodes have or find another coordinator after an error of this one. The
// process that has taken the lease of a job with several copies of the log announces itself to them.
func (o runOptions) deserts(err error) bool {
	return errors.Is(err, session.ErrOvertaken) || o.took != nil && !*o.took || o.logReplicas > 1 && errors.Is(err, store.ErrLeaseLost)
}

// listenElsewhere listens at a free port, and returns the address with it.
func listenElsewhere(ctx context.Context, c nodes.EndpointConfig) (e *nodes.Endpoint, at string, err error) {
	host, port, err := net.SplitHostPort(c.Address)
	if err != nil {
		return nil, "", err
	}
	c.Address = net.JoinHostPort(host, "0")
	if e, err = nodes.Listen(ctx, c); err != nil {
		return nil, "", err
	}
	_, free, err := net.SplitHostPort(e.Addr().String())
	if err != nil {
		return nil, "", errors.Join(err, e.Close())
	}
	c.Logger.Warn("port of the endpoint is taken on this node; another one serves the nodes", "taken", port, "port", free)
	return e, net.JoinHostPort(host, free), nil
}

// hadStandby reports whether the run's last job was coordinated by a node without ranks: its groups
// may outlive it.
func (o runOptions) hadStandby(ctx context.Context, st *store.Store, run string) bool {
	launches, err := query.Ask(ctx, st.Views(), query.Launches, query.Params{Run: run})
	return err == nil && len(launches) > 0 && len(launches[0].Jobs) > 0 && launches[0].Jobs[0].NProc == 0
}

// exclusion returns when a bad node is excluded, given --max-node-failures and whether the user
// gave it.
func exclusion(limit int, given bool) launch.Exclusion {
	switch {
	case limit > 0:
		return launch.ExcludeAlways
	case given:
		return launch.ExcludeNever
	}
	return launch.ExcludeSpared
}

// inherited returns the nodes that the run's last job has excluded, if its nodes continue under this
// coordinator.
func (o runOptions) inherited(ctx context.Context, st *store.Store, run string) ([]nodes.Excluded, error) {
	launches, err := query.Ask(ctx, st.Views(), query.Launches, query.Params{Run: run})
	if err != nil || len(launches) == 0 || len(launches[0].Jobs) == 0 {
		return nil, err
	}
	succeeds := ""
	if o.succeeding != nil {
		succeeds = o.succeeding.Job
	}
	return stillExcluded(launches[0].Jobs[0], succeeds, time.Now()), nil
}

// exclusionAge bounds how long an exclusion holds for the next job, if the last one has not
// recorded its end: most likely, its other trainers wait for a coordinator.
const exclusionAge = time.Hour

// stillExcluded returns the nodes that a run's last job has excluded and that the next one must not
// let in: if the next one takes over, or the last one has not ended in order and the exclusion is
// recent.
func stillExcluded(last projections.Job, succeeds string, now time.Time) (all []nodes.Excluded) {
	if last.Ended {
		return nil
	}
	for _, n := range last.Nodes {
		if n.Excluded && (last.ID == succeeds || now.Sub(n.LeftAt) < exclusionAge) {
			all = append(all, nodes.Excluded{Node: n.Node, Host: n.Host, Boot: n.Boot, Why: n.Reason})
		}
	}
	return all
}

// tunnelTo connects the other nodes to the owner of the store.
func tunnelTo(st *store.Store) http.Handler {
	return nodes.Tunnel(func(r *http.Request) (net.Conn, error) {
		return st.DialOwner(r.Context(), store.Door(r.PathValue("door")))
	})
}
