package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime/pprof"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// nodesBench is `bench nodes --json`. Figures of saves are medians over steady saves.
type nodesBench struct {
	Bench  string  `json:"bench"`
	Ranks  int     `json:"ranks"`
	Nodes  int     `json:"nodes"`
	Saves  int     `json:"saves"`
	Join   float64 `json:"join_seconds"`            // from the first join to group.started in the log
	First  float64 `json:"first_commit_seconds"`    // of the first save, which has all plans in full
	Commit float64 `json:"commit_seconds"`          // from all ranks' seals to checkpoint.committed in the log
	Views  float64 `json:"views_seconds"`           // from there until the views have it
	Log    int64   `json:"log_bytes"`               // of one save
	Events int64   `json:"events"`                  // of one save
	CPU    float64 `json:"coordinator_cpu_seconds"` // of the coordinating process in one save, with its log server, endpoint and views
	Beats  float64 `json:"beats_cpu"`               // share of a core of that process between saves
	Agents float64 `json:"nodes_cpu_seconds"`       // of all nodes in one save
	RSS    int64   `json:"coordinator_peak_rss_bytes"`
}

func (a *bench) nodesVerb() *cobra.Command {
	b, dir, profile := nodesBench{Bench: "nodes"}, "", ""
	c := &cobra.Command{
		Use: "nodes", Short: "Time saves of a job over many nodes", Args: console.Args(cobra.NoArgs),
		Long: `Time the coordination of a job over many nodes. This process coordinates: it owns a
store with its log and views, and listens for nodes. A second process is all nodes:
each joins by TCP, and appends the events of its ranks through its own connection.

The ranks and their bytes are not real. A save begins when all ranks have sealed
their bytes, and ends when checkpoint.committed is in the log. Each node hears of the
save from the coordinating process, as in a job. No file of a rank is written or
checked.
The first save has the plans of all ranks; figures of saves are medians of the
--saves after the second. CPU time is of the whole coordinating process.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if b.Nodes < 1 || b.Ranks < b.Nodes || b.Saves < 1 {
				return console.Usagef("--ranks %d --nodes %d --saves %d: want at least one of each, and a rank a node", b.Ranks, b.Nodes, b.Saves)
			}
			if err := scratch(dir, func(dir string) error { return b.run(c.Context(), dir, profile) }); err != nil {
				return err
			}
			return console.Emit(a.Console, b, []nodesBench{b}, func(w *tabwriter.Writer, _ bool) {
				console.Row(w, "RANKS", "NODES", "JOIN", "FIRST", "COMMIT", "VIEWS", "EVENTS", "LOG", "CPU", "NODES CPU", "BEATS", "RSS")
				console.Row(w, b.Ranks, b.Nodes, seconds(b.Join), seconds(b.First), seconds(b.Commit), seconds(b.Views), b.Events, bytesize.Text(b.Log), seconds(b.CPU), seconds(b.Agents), fmt.Sprintf("%.2g%%", 100*b.Beats), bytesize.Text(b.RSS))
			})
		},
	}
	f := c.Flags()
	f.IntVar(&b.Ranks, "ranks", 10_000, "ranks that save")
	f.IntVar(&b.Nodes, "nodes", 1250, "nodes, besides the coordinating one, which has no rank")
	f.IntVar(&b.Saves, "saves", 3, "saves that are measured")
	f.StringVar(&dir, "dir", ".", "parent of the new directory, which determines the measured disk")
	f.StringVar(&profile, "cpuprofile", "", "file for the CPU profile of the measured saves")
	_ = f.MarkHidden("cpuprofile") // it exists
	return c
}

// run computes the figures.
func (b *nodesBench) run(ctx context.Context, dir, profile string) (err error) {
	if _, err := store.Init(ctx, dir, ""); err != nil {
		return err
	}
	st, err := store.Open(ctx, store.Options{Location: dir})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	h := &hostBench{nodesBench: b, st: st, job: store.NewID()}
	defer func() { err = errors.Join(err, h.close()) }()
	if err := h.listen(ctx); err != nil {
		return err
	}
	if err := h.gather(ctx); err != nil {
		return err
	}
	return h.saves(ctx, profile)
}

// hostBench is the coordinating process.
type hostBench struct {
	*nodesBench
	st       *store.Store
	job      string
	endpoint *nodes.Endpoint
	drained  chan struct{} // closed when the endpoint's events have ended
	held     *session.Job
	group    *session.Group
	stop     context.CancelFunc // ends the group
	child    *exec.Cmd
	orders   io.WriteCloser // of the child
	says     *bufio.Scanner
	commits  chan time.Time

	forwarded chan error // why an event could not be forwarded to the nodes
}

// nodesOrder is what the process of the nodes needs to know.
type nodesOrder struct {
	Address string `json:"address"`
	Token   string `json:"token"`
	Job     string `json:"job"`
	Ranks   int    `json:"ranks"`
	Nodes   int    `json:"nodes"`
}

// nodesTimeout is the time without a beat after which a node is lost.
const nodesTimeout = 30 * time.Second

// listen starts the endpoint and the process of the nodes.
func (h *hostBench) listen(ctx context.Context) (err error) {
	token := store.NewID()
	h.endpoint, err = nodes.Listen(ctx, nodes.EndpointConfig{
		Address: "127.0.0.1:0", Token: token, Job: h.job, Run: benchRun, Store: h.st.ID, Version: "bench",
		Min: h.Nodes + 1, Max: h.Nodes + 1, Self: nodes.Node{Index: 0, Key: "0"}, Timeout: nodesTimeout,
	})
	if err != nil {
		return err
	}
	h.endpoint.Handle("POST /v1/store/{door}", nodes.Tunnel(func(r *http.Request) (net.Conn, error) {
		return h.st.DialOwner(r.Context(), store.Door(r.PathValue("door")))
	}))
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the program that the nodes run: %w", err)
	}
	h.child = exec.CommandContext(ctx, self, "bench", nodesCommand)
	h.child.Stderr = os.Stderr
	if h.orders, err = h.child.StdinPipe(); err != nil {
		return err
	}
	out, err := h.child.StdoutPipe()
	if err != nil {
		return err
	}
	h.says = bufio.NewScanner(out)
	if err := h.child.Start(); err != nil {
		return err
	}
	if err := json.NewEncoder(h.orders).Encode(nodesOrder{h.endpoint.Addr().String(), token, h.job, h.Ranks, h.Nodes}); err != nil {
		return err
	}
	return h.hear("ready")
}

// order sends a line to the nodes.
func (h *hostBench) order(format string, args ...any) error {
	_, err := fmt.Fprintf(h.orders, format+"\n", args...)
	return err
}

// hear waits for a line of the nodes, and returns what follows its first word.
func (h *hostBench) hear(want string) error {
	if !h.says.Scan() {
		return fmt.Errorf("the nodes ended, before %q: %w", want, errors.Join(h.says.Err(), io.ErrUnexpectedEOF))
	}
	if got := h.says.Text(); got != want {
		return fmt.Errorf("the nodes report %q, want %q", got, want)
	}
	return nil
}

// gather lets the nodes join, and opens the attempt.
func (h *hostBench) gather(ctx context.Context) error {
	shared, _ := shm.Dir()
	h.commits = make(chan time.Time, 1)
	place := make(session.Nodes, 1, h.Nodes+1) // the coordinating node has no ranks
	place[0] = []int{}
	counts := make([]int, h.Nodes+1)
	for node, rank := 0, 0; node < h.Nodes; node++ {
		var of []int
		for range (h.Ranks - rank) / (h.Nodes - node) {
			of = append(of, rank)
			rank++
		}
		place, counts[node+1] = append(place, of), len(of)
	}
	h.held = session.NewJob(ctx, session.Config{
		Run: benchRun, Trial: projections.DefaultTrial, Job: h.job, Nodes: place, NewID: store.NewID, Logger: slog.New(slog.DiscardHandler),
		Committed: func() { h.commits <- time.Now() },
	}, session.Store{
		ID: h.st.ID, Log: h.st.Log, Views: store.Queries{From: h.st.Views()}, Blobs: h.st.Blobs, Data: h.st.Data, Foreign: store.OpenForeign,
		Storage: benchStorage{}, Conflict: func(err error) bool { return errors.Is(err, jetlog.ErrConflict) }, Unserved: store.Unserved,
		Runtime: h.st.Runtime, Shared: shared,
	})
	if err := h.held.Open(); err != nil {
		return err
	}
	if _, err := h.held.OpenTrial(ctx, nil); err != nil {
		return err
	}
	h.drained = make(chan struct{})
	go func() {
		defer close(h.drained)
		for e := range h.endpoint.Events() {
			if e, ok := e.(nodes.Joined); ok { // an error shows in the next decision
				_ = h.held.AppendOfRun(ctx, &events.NodeJoined{Job: h.job, Node: e.Member.Index, Host: e.Member.Host})
			}
		}
	}()
	begin := time.Now()
	if err := h.order("join"); err != nil {
		return err
	}
	members, err := h.endpoint.Gather(ctx, time.Minute, time.Minute, 0)
	if err != nil {
		return err
	}
	started := &events.GroupStarted{Attempt: 1, Job: h.job, WorldSize: h.Ranks, Backend: "cpu"}
	var named events.NodeMap
	for _, m := range members {
		named.Index, named.Key = append(named.Index, m.Index), append(named.Key, m.Key)
		named.Host, named.Address = append(named.Host, m.Host), append(named.Address, m.Address)
	}
	started.Nodes = events.NodeRuns(named.Index, counts)
	text, err := json.Marshal(named)
	if err != nil {
		return err
	}
	blob, err := h.st.Blobs.Put(ctx, text)
	if err != nil {
		return err
	}
	started.Map = &blob
	from, err := h.held.StartAttempt(ctx, started)
	if err != nil {
		return err
	}
	h.Join = time.Since(begin).Seconds()
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	h.stop = stop
	forward := &benchForward{h.endpoint, members[1:], make(chan error, 1)}
	for _, m := range members[1:] {
		if err := h.endpoint.Send(m.Index, "start", place); err != nil {
			return err
		}
	}
	h.forwarded = forward.failed
	h.group = h.held.Begin(work, session.Attempt{Number: 1, Resume: "", Started: from, Nodes: place, Forward: forward})
	return h.hear("started")
}

// saves measures saves.
func (h *hostBench) saves(ctx context.Context, profile string) error {
	var commit, views, cpu, agents, log, count []float64
	for n := range h.Saves + 2 {
		if n == 2 && profile != "" {
			f, err := os.Create(profile)
			if err != nil {
				return err
			}
			defer f.Close()
			if err := pprof.StartCPUProfile(f); err != nil {
				return err
			}
			defer pprof.StopCPUProfile()
		}
		s, err := h.save(ctx, n)
		if err != nil {
			return fmt.Errorf("save %d: %w", n, err)
		}
		if n == 0 {
			h.First = s.commit
		}
		if n < 2 {
			continue // the second lists the fingerprints
		}
		commit, views, cpu, agents = append(commit, s.commit), append(views, s.views), append(cpu, s.cpu), append(agents, s.agents)
		log, count = append(log, s.log), append(count, s.events)
	}
	h.Commit, h.Views, h.CPU, h.Agents = middle(commit), middle(views), middle(cpu), middle(agents)
	h.Log, h.Events = int64(middle(log)), int64(middle(count))
	pprof.StopCPUProfile()
	before, at := cpuSeconds(syscall.RUSAGE_SELF), time.Now()
	timer := time.NewTimer(2 * time.Second)
	defer timer.Stop()
	<-timer.C
	h.Beats = (cpuSeconds(syscall.RUSAGE_SELF) - before) / time.Since(at).Seconds()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return err
	}
	h.RSS = usage.Maxrss << 10
	return nil
}

// savedOnce is the figures of one save.
type savedOnce struct{ commit, views, cpu, agents, log, events float64 }

func (h *hostBench) save(ctx context.Context, n int) (s savedOnce, err error) {
	before, err := h.st.Log.Info(ctx)
	if err != nil {
		return s, err
	}
	own, err := cpuOf(h.child.Process.Pid)
	if err != nil {
		return s, err
	}
	cpu, begin := cpuSeconds(syscall.RUSAGE_SELF), time.Now()
	if err := h.order("save %d", n); err != nil {
		return s, err
	}
	id := fmt.Sprintf("step-%d.a1", n)
	select {
	case at := <-h.commits:
		s.commit, s.cpu = at.Sub(begin).Seconds(), cpuSeconds(syscall.RUSAGE_SELF)-cpu
		c, err := query.Ask(ctx, h.st.Views(), query.Resolve, query.Params{Ref: benchRun + "@" + id})
		if err != nil {
			return s, err
		}
		s.views = time.Since(at).Seconds()
		if c.Writes != h.Ranks || c.State != projections.Committed {
			return s, fmt.Errorf("the views have %s with %d writes of %d ranks", c.State, c.Writes, h.Ranks)
		}
	case <-time.After(5 * time.Minute):
		return s, errors.New("not committed in five minutes")
	case err := <-h.forwarded:
		return s, err
	case err := <-h.group.Saved():
		return s, fmt.Errorf("the saver has ended: %w", err)
	case <-ctx.Done():
		return s, ctx.Err()
	}
	if err := h.hear("committed " + id); err != nil {
		return s, err
	}
	after, err := h.st.Log.Info(ctx)
	if err != nil {
		return s, err
	}
	if s.agents, err = cpuOf(h.child.Process.Pid); err != nil {
		return s, err
	}
	s.agents -= own
	s.log, s.events = float64(after.Bytes-before.Bytes), float64(after.Last-before.Last)
	return s, nil
}

// benchForward forwards events as a trainer does.
type benchForward struct {
	endpoint *nodes.Endpoint
	to       []nodes.Member
	failed   chan error
}

var _ session.Forwarder = (*benchForward)(nil)

// Event implements [session.Forwarder].
func (f *benchForward) Event(e session.Forwarded) {
	text, err := json.Marshal(e)
	for _, m := range f.to {
		if err == nil {
			err = f.endpoint.Send(m.Index, nodesEvent, json.RawMessage(text))
		}
	}
	f.fail(err)
}

// Ask implements [session.Forwarder]. The ranks send in full what the log does not have.
func (f *benchForward) Ask(checkpoint string, rank int) {
	f.fail(fmt.Errorf("the plan of rank %d in %s is unknown", rank, checkpoint))
}

func (f *benchForward) fail(err error) {
	if err == nil {
		return
	}
	select {
	case f.failed <- err:
	default:
	}
}

// close ends all that was started.
func (h *hostBench) close() (err error) {
	if h.stop != nil {
		h.stop()
		err = errors.Join(err, h.group.StopSaves(), h.group.Close())
	}
	if h.child != nil && h.child.Process != nil {
		_ = h.orders.Close() // ends the nodes
		err = errors.Join(err, h.child.Wait())
	}
	if h.endpoint != nil {
		err = errors.Join(err, h.endpoint.Close())
	}
	if h.drained != nil {
		<-h.drained
	}
	if h.held != nil {
		err = h.held.Close(err)
	}
	return err
}

func cpuSeconds(who int) float64 {
	var usage syscall.Rusage
	if err := syscall.Getrusage(who, &usage); err != nil {
		return 0 // impossible: who is valid
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano()).Seconds()
}

// benchStorage takes the files of the ranks as written.
type benchStorage struct{}

var _ data.Storage = benchStorage{}

// Writer implements [data.Storage].
func (benchStorage) Writer(at data.Location) data.Writer { return benchWriter{at.Writer, at} }

// Reader implements [data.Storage].
func (benchStorage) Reader(at data.Location) data.Reader { return at.Reader }

// benchWriter makes the manifest and the receipt durable, without the files of ranks.
type benchWriter struct {
	data.Writer
	at data.Location
}

// Finish implements [data.Writer].
func (w benchWriter) Finish(ctx context.Context, m checkpoint.Manifest, commit data.Commit) (checkpoint.Receipt, error) {
	if err := w.SetUp(ctx, true); err != nil {
		return checkpoint.Receipt{}, err
	}
	return w.at.Commit(ctx, m, commit)
}
