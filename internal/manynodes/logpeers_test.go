//go:build testbed || outlive

package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/natstest"
	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// copies starts a job of three nodes, each with a copy of the log, and has a fourth node for
// a spare.
func copies(t *testing.T) *scene {
	t.Helper()
	return copiesOf(t, job{nnodes: "3", nproc: 1, timeout: nodeTimeout})
}

func copiesOf(t *testing.T, j job) *scene {
	t.Helper()
	ctx, c := start(t, setting{nodes: []string{"a", "b", "c", "d"}, disk: netfs.NFS()})
	s := &scene{t: t, ctx: ctx, cluster: c, job: j}
	s.a, s.b, s.c = s.copyOn("a", "0"), s.copyOn("b", "1"), s.copyOn("c", "2")
	return s
}

// copyOn launches the trainer of a node with an index, or of a spare, which has no copy.
func (s *scene) copyOn(name, index string, more ...string) *trainer {
	s.t.Helper()
	s.job.more = append([]string{"--log-replicas", "3", "--max-infra-restarts", "5"}, more...)
	if index != "" {
		s.job.more = append(s.job.more, "--node-rank", index)
	}
	return s.launch(name)
}

// A node with a copy of the log loses its power. The others and a spare continue with the
// two copies that are left, and every acknowledged checkpoint is there.
func TestNodeWithCopyOfLogLost(t *testing.T) {
	t.Parallel()
	s := copiesOf(t, steady(job{nnodes: "3", nproc: 1}))
	s.group(0, 25)
	spare := s.copyOn("d", "")
	check(t, s.a.prints(s.ctx, "node=3"))
	last := s.newest()
	check(t, s.node("c").PowerOff())
	lost := time.Now()
	s.on(s.group(last, 25), "a", "b")
	t.Logf("trains again %v after the loss", time.Since(lost))
	if v := s.ends(s.ctx, t, s.a, s.b, spare); v.Saved < 4 || v.Attempts != last+1 {
		t.Errorf("%+v", v)
	}
}

// Two nodes with a copy lose their power one after the other, and each is back before the next
// fault. Its copy catches up, so a majority has every event.
func TestNodesWithCopiesLostInTurn(t *testing.T) {
	t.Parallel()
	s := copies(t)
	s.group(0, 25)
	for _, lost := range []struct {
		name, index string
		trainer     **trainer
	}{{"c", "2", &s.c}, {"b", "1", &s.b}} {
		last := s.newest()
		check(t, s.node(lost.name).PowerOff())
		check(t, s.node(lost.name).PowerOn(s.ctx))
		*lost.trainer = s.copyOn(lost.name, lost.index)
		s.on(s.group(last, 25), "a", "b", "c")
	}
	s.ends(s.ctx, t, s.a, s.b, s.c)
}

// The coordinating node loses its power, and its copy of the log with it. The node that is
// next takes the run, a spare takes the place, and the group continues from the newest
// checkpoint. No trainer was started.
func TestCoordinatingNodeWithCopyOfLogLost(t *testing.T) {
	t.Parallel()
	s := copiesOf(t, steady(job{nnodes: "3", nproc: 1}))
	s.group(0, 25)
	spare := s.copyOn("d", "")
	check(t, s.a.prints(s.ctx, "node=3"))
	last := s.newest()
	check(t, s.node("a").PowerOff())
	lost := time.Now()
	group := s.group(last, 25)
	t.Logf("trains again %v after the loss", time.Since(lost))
	for _, l := range group {
		if l.Host == "a" {
			t.Errorf("rank %d runs on the lost node", l.Rank)
		}
	}
	s.ends(s.ctx, t, s.b, s.c, spare)
	groups := of(s.events(), "group.started")
	if len(groups) != last+1 || groups[last].Data.Resume == "" || groups[0].Data.Job == groups[last].Data.Job {
		t.Errorf("groups %+v", groups)
	}
}

// Other programs listen at the endpoint's port on the nodes that may take over, as the trainers of other jobs do. The
// next node with a copy coordinates at another port.
func TestSuccessorWhosePortIsTaken(t *testing.T) {
	t.Parallel()
	s := copies(t)
	for _, name := range []string{"b", "c"} {
		n := s.node(name)
		l := must[net.Listener](t)(n.Listen(s.ctx, "tcp", fmt.Sprintf("%v:%d", n.Addr(), endpointPort)))
		defer func() { _ = l.Close() }()
	}
	s.group(0, 25)
	spare := s.copyOn("d", "")
	check(t, s.a.prints(s.ctx, "node=3"))
	last := s.newest()
	check(t, s.node("a").PowerOff())
	s.group(last, 25)
	s.ends(s.ctx, t, s.b, s.c, spare)
	if !strings.Contains(s.b.log.String(), "port of the endpoint is taken on this node") {
		t.Error("node b does not coordinate, or at the port of another program")
	}
}

// The coordinating node and another one with a copy lose their power. The third one cannot take
// the run without a majority, and waits for it. When the other one is back, it does.
func TestTakeoverWaitsForMajority(t *testing.T) {
	t.Parallel()
	s := copiesOf(t, steady(job{nnodes: "3", nproc: 1}))
	s.group(0, 25)
	spare := s.copyOn("d", "")
	check(t, s.a.prints(s.ctx, "node=3"))
	last := s.newest()
	check(t, s.node("c").PowerOff())
	check(t, s.node("a").PowerOff())
	check(t, s.b.prints(s.ctx, "log does not answer"))
	check(t, s.node("c").PowerOn(s.ctx))
	s.c = s.copyOn("c", "2")
	group := s.group(last, 25)
	for _, l := range group {
		if l.Host == "a" {
			t.Errorf("rank %d runs on the lost node", l.Rank)
		}
	}
	s.ends(s.ctx, t, s.b, s.c, spare)
}

// The log loses its majority for a while when a node is about to take the lease of a coordinating node that has lost
// its power. The node waits for the log, and takes over.
func TestLogSilentDuringTakeover(t *testing.T) {
	t.Parallel()
	s := copies(t)
	s.group(0, 25)
	spare := s.copyOn("d", "")
	check(t, s.a.prints(s.ctx, "node=3"))
	last := s.newest()
	check(t, s.node("a").PowerOff())
	check(t, s.b.prints(s.ctx, "taking over"))
	check(t, s.pass(9*time.Second)) // the store is open, and the lease has not expired
	s.bed.Switch().Cut("b", "c")
	check(t, s.pass(40*time.Second))
	s.bed.Switch().Heal("b", "c")
	s.group(last, 25)
	s.ends(s.ctx, t, s.b, s.c, spare)
}

// The coordinating trainer is paused for longer than its lease lasts. Another node takes the
// run. When the trainer continues, the log refuses its decisions, and no rank of its group
// is alive.
func TestPausedCoordinatorIsReplaced(t *testing.T) {
	t.Parallel()
	s := copiesOf(t, steady(job{nnodes: "3", nproc: 1}))
	s.group(0, 25)
	spare := s.copyOn("d", "")
	check(t, s.a.prints(s.ctx, "node=3"))
	last := s.newest()
	check(t, s.node("a").freeze())
	group := s.group(last, 12)
	for _, l := range group {
		if l.Host == "a" {
			t.Errorf("rank %d runs on the frozen node", l.Rank)
		}
	}
	check(t, s.node("a").thaw())
	if code := must[int](t)(s.a.code(s.ctx)); code != 5 {
		t.Errorf("the trainer on a exits with %d, want 5", code)
	}
	s.group(last, 40)
	s.ends(s.ctx, t, s.b, s.c, spare)
	all := s.events()
	groups := of(all, "group.started")
	if len(groups) != last+1 {
		t.Fatalf("groups %+v", groups)
	}
	for _, e := range all {
		decision := strings.Contains(e.Subject, ".s.") && e.Source == "trainer/"+groups[0].Data.Job
		if decision && e.Sequence > groups[last].Sequence {
			t.Errorf("the first coordinator has decided after the second: %+v", e)
		}
	}
}

// The node that would be next is cut off from the coordinating node alone, for longer than a
// lease lasts. It reaches the log, where the lease is renewed, and takes nothing over. It
// joins again when the link is back. If the copies of the log elect leaders on both sides of the cut in turn, the
// coordinating node may not reach the log for the length of a lease: then the other one takes over, and the
// nodes come to it.
func TestNodeCutFromCoordinator(t *testing.T) {
	t.Parallel()
	s := copies(t)
	s.group(0, 25)
	spare := s.copyOn("d", "")
	check(t, s.a.prints(s.ctx, "node=3"))
	s.bed.Switch().Cut("a", "b")
	check(t, s.b.prints(s.ctx, "taking over"))
	group := s.group(1, 12)
	check(t, s.pass(20*time.Second))
	s.bed.Switch().Heal("a", "b")
	if strings.Contains(s.b.log.String(), "waiting for nodes") {
		t.Log("the log has taken node b for the coordinator")
		s.replaces(spare)
		return
	}
	s.on(group, "a", "d", "c")
	check(t, await(s.ctx, "the return of b", func() (bool, error) { return strings.Count(s.b.log.String(), "msg=joined") > 1, nil }))
	s.ends(s.ctx, t, s.a, s.b, s.c, spare)
	groups := of(s.events(), "group.started")
	for _, g := range groups {
		if g.Data.Job != groups[0].Data.Job {
			t.Errorf("a group of another job: %+v", g)
		}
	}
}

// The coordinating node reaches the others and not the log, and its lease expires. A node that does not reach it
// takes over. When the log has told the first coordinator, the nodes that follow it come to the second one.
func TestNodesFollowToTheHolderOfTheLease(t *testing.T) {
	t.Parallel()
	s := copies(t)
	s.group(0, 25)
	spare := s.copyOn("d", "")
	check(t, s.a.prints(s.ctx, "node=3"))
	fabric := s.bed.Switch()
	fabric.Cut("a", "b")
	fabric.Only("a", "c", endpointPort)
	fabric.Only("a", "d", endpointPort)
	check(t, s.b.prints(s.ctx, "waiting for nodes"))
	for _, other := range []string{"b", "c", "d"} {
		fabric.Heal("a", other)
	}
	s.replaces(spare)
}

// replaces has b, c and d train under b, which has taken the lease from a.
func (s *scene) replaces(spare *trainer) {
	s.t.Helper()
	if code := must[int](s.t)(s.a.code(s.ctx)); code != 5 {
		s.t.Errorf("the trainer on a exits with %d, want 5", code)
	}
	check(s.t, await(s.ctx, "a group without node a", func() (bool, error) {
		lives, err := readLives(s.lives, 1)
		return slices.ContainsFunc(lives, func(l life) bool {
			group := groupOf(lives, l.Attempt)
			return len(group) == l.World && !slices.ContainsFunc(group, func(l life) bool { return l.Host == "a" || l.steps() < 25 })
		}), err
	}))
	s.ends(s.ctx, s.t, s.b, s.c, spare)
}

// serverVerb makes the test binary a NATS server of a cluster.
const serverVerb = "nats-server"

// neverEnds is a standard input that stays open.
type neverEnds struct{}

// Read implements io.Reader.
func (neverEnds) Read([]byte) (int, error) { select {} }

// Ports of NATS servers on their nodes.
const (
	clientPort = 4222
	routePort  = 6222
)

// natsCluster starts a NATS server on each of the nodes, makes a store whose log has three
// copies there, and has the job use it.
func (s *scene) natsCluster(nodes ...string) (servers []*trainer) {
	s.t.Helper()
	var routes, urls []string
	for _, name := range nodes {
		routes = append(routes, fmt.Sprintf("%v:%d", s.node(name).Addr(), routePort))
		urls = append(urls, fmt.Sprintf("nats://%v:%d", s.node(name).Addr(), clientPort))
	}
	for _, name := range nodes {
		p := natstest.Peer{Name: name, Dir: filepath.Join(s.dir, "log-"+name), Host: s.node(name).Addr().String(), Client: clientPort, Route: routePort, Routes: routes, Watch: jetlog.Stream}
		servers = append(servers, s.natsServer(name, p))
	}
	s.job.store = strings.Join(urls, ",")
	program := filepath.Join(s.bin, "ckptstore")
	check(s.t, await(s.ctx, "a log of three copies", func() (bool, error) {
		out, err := s.node(nodes[0]).Command(s.ctx, program, "init", "--store", s.job.store, "--data", storeAt, "--replicas", "3").CombinedOutput()
		if err != nil {
			s.t.Logf("%s", out)
		}
		return err == nil, s.ctx.Err()
	}))
	s.job.env = []string{"CKPTSTORE_STORE_TOKEN=" + strings.Repeat("0123456789abcdef", 4)}
	return servers
}

func (s *scene) natsServer(name string, p natstest.Peer) *trainer {
	s.t.Helper()
	self, err := os.Executable()
	check(s.t, err)
	return must[*trainer](s.t)(s.execute(s.ctx, s.node(name), self, []string{serverVerb, p.Text()}, nil))
}

// again starts a NATS server that was killed.
func (s *scene) again(old *trainer) *trainer {
	s.t.Helper()
	return must[*trainer](s.t)(s.execute(s.ctx, old.on, old.Path, old.Args[1:], nil))
}

// The log is on a NATS cluster of three servers. Each is killed in turn, so the leader too,
// and then two of three are away for longer than half of the node timeout, or for MANYNODES_PAUSE.
// The training continues from one save to the next, no group restarts, and the saves commit when there is
// a quorum again.
func TestClusterOfLogLosesServersAndQuorum(t *testing.T) {
	t.Parallel()
	ctx, c := start(t, setting{nodes: []string{"a", "b", "c"}, disk: netfs.NFS()})
	j := twoNodes()
	j.timeout, j.worker = usualTimeout, []string{"--every", "100", "--pace", "20ms"}
	s := &scene{t: t, ctx: ctx, cluster: c, job: j}
	servers := s.natsCluster("a", "b", "c")
	s.a, s.b = s.launch("a"), s.launch("b")
	s.group(0, 60)
	for i, server := range servers {
		check(t, server.kill())
		must[int](t)(server.code(ctx))
		must[int](t)(s.moves(ctx, 0, s.a, s.b))
		servers[i] = s.again(server)
		must[int](t)(s.moves(ctx, 0, s.a, s.b))
		check(t, servers[i].prints(ctx, "nats://"))
	}
	// The training waits for a save before it begins the next: from a commit on, 100 steps follow without waiting.
	all := s.commits()
	check(t, await(ctx, "a commit by all servers", func() (bool, error) { return s.commits() > all, nil }))
	upTo := 100 * (s.commits() + 2) // steps: the save before is under way
	for _, server := range servers[1:] {
		check(t, server.kill())
		must[int](t)(server.code(ctx))
	}
	before := s.commits()
	must[[]life](t)(s.trains(ctx, 0, upTo)) // on the slots
	check(t, s.pass(max(usualTimeout/2+time.Second, longest)))
	if now := s.commits(); now > before+1 { // one may have been acknowledged just before
		t.Errorf("%d saves committed without a quorum", now-before)
	}
	for i := range servers[1:] {
		servers[1+i] = s.again(servers[1+i])
	}
	check(t, await(ctx, "saves after the quorum is back", func() (bool, error) { return s.commits() > before+1, nil }))
	check(t, s.finish())
	s.ended(s.a, s.b)
	lives := must[[]life](t)(readLives(s.lives, 0))
	if slices.ContainsFunc(lives, func(l life) bool { return l.Attempt != 1 }) {
		t.Errorf("the group was restarted: %+v", lives)
	}
	for _, server := range servers {
		check(t, unix.Kill(server.Process.Pid, unix.SIGKILL))
	}
}

// commits counts the saves that rank 0 knows to be committed.
func (s *scene) commits() (n int) {
	s.t.Helper()
	for _, l := range must[[]life](s.t)(readLives(s.lives, 0)) {
		if l.Rank == 0 {
			for _, line := range l.Lines {
				if line.What == whatSaved {
					n++
				}
			}
		}
	}
	return n
}

// A job has copies of its log and of its slots. A node loses its power, with its copy of the log,
// after all ranks have sealed a save and before it has written its files. Its partner writes them,
// the two other copies of the log have the commit, and the next group continues.
func TestNodeWithCopiesOfLogAndSlotsLost(t *testing.T) {
	t.Parallel()
	ctx, c := start(t, setting{nodes: []string{"a", "b", "c", "d"}, disk: netfs.NFS()})
	s := &scene{t: t, ctx: ctx, cluster: c, job: job{nnodes: "3", nproc: 1, timeout: firm, worker: []string{"--stubborn"}}}
	more := []string{"--replicas", "1", "--log-replica-dir", "/tmp/log"} // not on the disk that hangs
	s.a, s.b, s.c = s.copyOn("a", "0", more...), s.copyOn("b", "1", more...), s.copyOn("c", "2", more...)
	s.group(0, 12)
	spare := s.copyOn("d", "", "--replicas", "1")
	check(t, s.a.prints(ctx, "node=3"))
	disk := s.node("c").Disk(sharedAt)
	disk.Break(netfs.Fault{Ops: []netfs.Op{netfs.OpWrite, netfs.OpFsync}, Hang: true})
	var save string
	check(t, await(ctx, "a save that all have sealed and copied, and c has not written", func() (bool, error) {
		all, err := s.eventsFrom("a")
		for _, staged := range of(all, "checkpoint.staged") {
			is := func(e event) bool { return e.Data.Checkpoint == staged.Data.Checkpoint }
			copied := slices.DeleteFunc(of(all, "replica.node"), func(e event) bool { return !is(e) })
			if len(copied) == 3 && !slices.ContainsFunc(of(all, "checkpoint.committed"), is) && disk.Counters().Hanging > 0 {
				save = staged.Data.Checkpoint
			}
		}
		return save != "", err
	}))
	last := s.newest()
	check(t, s.node("c").PowerOff())
	s.on(s.group(last, 12), "a", "b")
	s.committed(save)
	check(t, s.finish()) // the judge has no access to the copies of the log
	for _, tr := range []*trainer{s.a, s.b, spare} {
		if code := must[int](t)(tr.code(ctx)); code != 0 {
			t.Errorf("the trainer on %s exits with %d", tr.on.Name(), code)
		}
	}
}
