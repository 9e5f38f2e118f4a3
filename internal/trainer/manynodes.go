package trainer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/backend"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/problem/system"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/services"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// nodesOptions configure a job over several nodes.
type nodesOptions struct {
	nodeTimeout, endpointWait, lastCall time.Duration
	logOptions

	replicas        int
	maxNodeFailures int
	preflight       bool
	broadcast       bool
	replicaRate     string
	domain          string
}

func (o *nodesOptions) flags(f *pflag.FlagSet) {
	f.DurationVar(&o.nodeTimeout, "node-timeout", 10*time.Second, "silence after which a node is lost; a node that gets no answer kills its workers after half of it")
	f.DurationVar(&o.endpointWait, "endpoint-wait", 10*time.Minute, "how long to wait for the other nodes, and for the endpoint")
	f.IntVar(&o.maxNodeFailures, "max-node-failures", 0, "failures in a row of one node's ranks, while those of other nodes do not fail and nothing is committed, after which the node is excluded and a spare takes its place, or the job waits for one; 0 for never")
	f.BoolVar(&o.preflight, "preflight", false, "measure the network of all nodes before the first group, for up to 10 s, and exclude a node with less than half of the median rate if a spare is there; with --max-node-failures 0, only measure")
	f.IntVar(&o.logReplicas, "log-replicas", 1, "copies of the log of a directory, on the first nodes of the job: 1, or 3 (one may be lost)")
	f.BoolVar(&o.broadcast, "broadcast", true, "in a load over several nodes, read from the store once what several nodes want, and pass it on between them")
	f.StringVar(&o.logReplicaDir, "log-replica-dir", "", "with --log-replicas 3: directory of this node's copy (default: STORE/log.INDEX)")
	f.IntVar(&o.replicas, "replicas", 0, "how many other nodes keep a copy of each sealed slot in memory, 0 or 1: a save that all ranks have sealed survives the loss of a node")
	f.StringVar(&o.replicaRate, "replica-rate", "256MiB", "most bytes that a node sends to its replica in a second, such as 1GiB; 0 for any number")
	f.StringVar(&o.domain, "domain", "", "failure domain of this node, such as its rack: replicas are kept in another one")
	f.DurationVar(&o.lastCall, "last-call", 30*time.Second, "with MIN:MAX, how long to wait for more nodes than MIN")
}

// replication sets how the job replicates slots.
func (o *nodesOptions) replication(cfg *launch.Config, n placement) error {
	if o.replicas == 1 && n.max == 1 {
		return fmt.Errorf("%w: --replicas 1: a job on one node has no other node for the copies; give --nnodes too, or leave it out", launch.ErrConfig)
	}
	if o.replicas < 0 || o.replicas > 1 {
		return fmt.Errorf("%w: --replicas %d: give 0 or 1; more copies are not supported", launch.ErrConfig, o.replicas)
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

// maxDomain bounds the name of a failure domain in bytes.
const maxDomain = 256

// listenPeers listens for the requests of other nodes: replicas, measurements, and what they take
// in loads; nil if the job has none of them.
func (o runOptions) listenPeers(ctx context.Context, cfg launch.Config, endpoint string) (*nodes.Peers, error) {
	if cfg.Replicas == 0 && !o.preflight && !o.broadcast {
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
		if err != nil || seconds < 1 {
			return nil, fmt.Errorf("%w: --rdzv-conf %s=%s: give a number of seconds above 0", launch.ErrConfig, key, value)
		}
		if !asked(flag) {
			*limit = time.Duration(seconds) * time.Second
		}
	}
	return notes, nil
}

// The port of an endpoint that is given without one: torchrun's.
const defaultEndpointPort = 29400

// slurmPorts is the first of the ports that jobs of Slurm use, by their numbers, so that
// two jobs may share a machine.
const slurmPorts, slurmPortCount = 20000, 10000

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

// isHere reports whether an endpoint's host is this machine.
func isHere(ctx context.Context, endpoint string) bool {
	host, _, err := net.SplitHostPort(endpoint)
	if err != nil {
		return false
	}
	if name, err := os.Hostname(); err == nil && (host == name || host == "localhost") {
		return true
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return false
	}
	local, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	return slices.ContainsFunc(local, func(a net.Addr) bool {
		p, err := netip.ParsePrefix(a.String())
		return err == nil && slices.ContainsFunc(addrs, func(to netip.Addr) bool { return to.Unmap() == p.Addr().Unmap() })
	})
}

// errTaken reports that another process listens at the endpoint.
var errTaken = errors.New("another process listens at the endpoint")

// taken reports whether another process listens at an endpoint of this machine.
func taken(ctx context.Context, endpoint string) bool {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", endpoint)
	if err != nil {
		return errors.Is(err, syscall.EADDRINUSE)
	}
	_ = l.Close() // a probe
	return false
}

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
}

// self describes this node to the others.
func (o runOptions) self(n placement, cfg launch.Config) nodes.Node {
	node := nodes.Node{Index: -1, Procs: len(cfg.Local()), Version: release, Command: commandDigest(cfg.Command), Address: o.localAddr, Domain: o.domain}
	cfg.Peers.Declare(&node)
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
	if cfg.Peers, err = o.listenPeers(ctx, cfg, at); err != nil {
		return err
	}
	defer func() { _ = cfg.Peers.Close() }() // nothing is sent any more
	if o.logReplicas == 1 {
		return o.meet(ctx, cfg, n, at)
	}
	return o.withPeers(ctx, cfg, n, at)
}

// meet coordinates the job, or follows the trainer that does.
func (o runOptions) meet(ctx context.Context, cfg launch.Config, n placement, at string) error {
	if now := o.elsewhere(ctx, at); now != at {
		return o.follow(ctx, cfg, n, now)
	}
	if isHere(ctx, at) && !taken(ctx, at) {
		if err := o.coordinate(ctx, cfg, n, at); !errors.Is(err, errTaken) {
			return err
		} // another trainer of this machine was faster
	}
	return o.follow(ctx, cfg, n, at)
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
			Strict: cfg.StrictReplicas,
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
		cfg.Contact = &launch.Contact{}
		listen := nodes.EndpointConfig{
			Address: at, Token: os.Getenv(store.EnvToken), Job: cfg.Job, Run: cfg.Run, Store: st.ID, Version: release,
			Min: n.min, Max: n.max, Self: o.self(n, cfg), Timeout: o.nodeTimeout, Welcome: hello, Logger: cfg.Logger,
			Ticked: cfg.Contact.Answered,
		}
		if listen.Excluded, err = o.inherited(ctx, st, cfg.Run); err != nil {
			return err
		}
		if !url {
			listen.Dir, listen.Token = joinDir(st.Dir()), ""
		}
		endpoint, err := nodes.Listen(ctx, listen)
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
		cfg.Endpoint, cfg.GatherTimeout, cfg.LastCall = endpoint, o.endpointWait, o.lastCall
		cfg.Logger.Info("waiting for nodes", "endpoint", at, "least", n.min, "most", n.max)
		return leased(ctx, st, cfg, hold, func(ctx context.Context) error {
			withdraw, err := o.announce(cfg, n, at)
			if err != nil {
				return err
			}
			defer withdraw()
			return runLeased(ctx, st, cfg, o.parts.Storage)
		})
	})
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

// follow runs this node's part of a job that another trainer coordinates. A node that was
// taken for lost joins again, and so does one whose coordinating trainer was started again.
func (o runOptions) follow(ctx context.Context, cfg launch.Config, n placement, at string) error {
	me := o.self(n, cfg)
	for {
		job, err := o.followOnce(ctx, cfg, n, &me, at)
		if !n.ranked && me.Index >= 0 && slices.Contains(system.Kinds(err), problem.Conflict) {
			me.Index = -1 // another node was faster to take the index that this one had
			continue
		}
		if ctx.Err() == nil && errors.Is(err, errSucceed) {
			err = o.succeed(ctx, cfg, n, job, at)
			if !errors.Is(err, errTaken) && !errors.As(err, new(*store.RunningError)) {
				return err
			}
			cfg.Logger.Warn("not taking over", "because", err)
			at = o.elsewhere(ctx, at)
			continue
		}
		if ctx.Err() == nil && (errors.Is(err, nodes.ErrExpelled) || errors.Is(err, nodes.ErrRestarted)) {
			cfg.Logger.Warn("joining again", "because", err)
			at = o.elsewhere(ctx, at)
			continue
		}
		if ended := (*nodes.EndedError)(nil); errors.As(err, &ended) && ended.Code == 0 {
			cfg.Logger.Info("job has ended", "node", me.Index)
			return nil
		}
		return err
	}
}

// followOnce follows one job, as the node me, and returns its ID, if it joined one.
func (o runOptions) followOnce(ctx context.Context, cfg launch.Config, n placement, me *nodes.Node, at string) (id string, err error) {
	port, err := launch.HoldPort()
	if err != nil {
		return "", err
	}
	me.Port = port.Port()
	contact := &launch.Contact{}
	join := nodes.JoinConfig{Address: at, Token: os.Getenv(store.EnvToken), Self: *me, Logger: cfg.Logger, Wait: o.endpointWait, Answered: contact.Answered}
	url := strings.Contains(o.store, "://")
	if !url {
		dir, err := filepath.Abs(o.store)
		if err != nil {
			return "", fmt.Errorf("--store: %w", err)
		}
		join.Dir, join.Token = joinDir(dir), ""
	}
	joining, joined := o.unlessMoved(ctx, at)
	defer joined()
	link, err := nodes.Join(joining, join)
	joined()
	if errors.Is(err, errMoved) {
		return "", fmt.Errorf("%w: %w", nodes.ErrRestarted, err)
	}
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil && link.Err() == nil {
			leave(ctx, link, err, cfg.Logger)
		}
		link.Close()
	}()
	*me = link.Self() // keeps its key, and its index under another coordinating trainer
	me.Index = link.Index()
	var job welcome
	if err := json.Unmarshal(link.Welcome(), &job); err != nil {
		return "", fmt.Errorf("join the job at %s: %w", at, err)
	}
	cfg.Run, cfg.Job, cfg.TrialConfig, cfg.StrictReplicas = job.Run, job.Job, job.Config, job.Strict
	cfg.SaveTimeout, cfg.DrainTimeout, cfg.Grace, cfg.Collective = job.SaveTimeout, job.Drain, job.Grace, job.Collective
	cfg.Logger.Info("joined", "endpoint", at, "run", job.Run, "job", job.Job, "node", link.Index())
	if o.logReplicas != 1 {
		watching, stop := context.WithCancel(ctx)
		defer stop()
		go successor{o.store, o.copyIndex(n), cfg.Logger}.watch(watching, link, job.Job)
	}
	open := store.Options{Location: o.store, Patience: o.wait, Logger: slog.New(quietAfter{cfg.Logger.Handler(), link})}
	if !url {
		if err := link.ProveShared(ctx, join.Dir); err != nil {
			return job.Job, fmt.Errorf("join the job at %s: %w", at, err)
		}
		if err := o.unreplicated(n); err != nil {
			return job.Job, err
		}
		open.Patience = o.endpointWait // the link ends before, if the coordinating trainer does
	}
	if !url && o.logReplicas == 1 {
		open.Owner = func(ctx context.Context, door store.Door) (net.Conn, error) {
			return link.Dial(ctx, "/v1/store/"+string(door))
		}
	}
	life, end := context.WithCancel(ctx)
	defer end()
	go func() {
		select {
		case <-link.Done():
			end()
		case <-life.Done():
		}
	}()
	followed := false
	err = o.opened(life, cfg, open, func(_ context.Context, st *store.Store, cfg launch.Config) (err error) {
		followed = true
		about := services.Following(st, cfg.Logger, nil)
		defer func() { err = errors.Join(err, about.Close()) }()
		cfg.Services, cfg.Contact, cfg.Port = about, contact, port
		return launch.Follow(ctx, cfg, sessionStore(st, cfg, o.parts.Storage), link)
	})
	if ended := link.Err(); !followed && ended != nil { // while the store was being opened
		return job.Job, ended
	}
	return job.Job, err
}

// quietAfter drops what is not a warning once the job has ended: the connections to its log
// end with it.
type quietAfter struct {
	slog.Handler
	link *nodes.Link
}

// Enabled implements [slog.Handler].
func (h quietAfter) Enabled(ctx context.Context, level slog.Level) bool {
	return h.Handler.Enabled(ctx, level) && (level >= slog.LevelWarn || !h.link.Ending())
}

// WithAttrs implements [slog.Handler].
func (h quietAfter) WithAttrs(of []slog.Attr) slog.Handler {
	return quietAfter{h.Handler.WithAttrs(of), h.link}
}

// WithGroup implements [slog.Handler].
func (h quietAfter) WithGroup(name string) slog.Handler {
	return quietAfter{h.Handler.WithGroup(name), h.link}
}

// leave tells the coordinating trainer that this node ends because of why.
func leave(ctx context.Context, link *nodes.Link, why error, log *slog.Logger) {
	words, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	if err := link.Leave(words, session.Beginning(why.Error(), session.MaxMessage)); err != nil {
		log.Warn("end of this node not sent to the coordinating trainer", "error", err)
	}
}

// leaveTimeout bounds the last words of a node that fails.
const leaveTimeout = 5 * time.Second

// tunnelTo connects the other nodes to the owner of the store.
func tunnelTo(st *store.Store) http.Handler {
	return nodes.Tunnel(func(r *http.Request) (net.Conn, error) {
		return st.DialOwner(r.Context(), store.Door(r.PathValue("door")))
	})
}
