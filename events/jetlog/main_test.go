package jetlog

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/natstest"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nuid"
	"go.uber.org/goleak"
)

// The test binary is also a NATS server in a separate process, so that it can be
// killed: with serverDir set it serves until its standard input ends.
const (
	serverDir  = "JETLOG_TEST_SERVER_DIR"
	serverPort = "JETLOG_TEST_SERVER_PORT"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(serverPeer); text != "" {
		if err := natstest.ServePeer(text, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if dir := os.Getenv(serverDir); dir != "" {
		if err := serveProcess(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// These tests wait for servers more than they compute. A number on the command line takes
	// precedence.
	if err := flag.Set("test.parallel", "5"); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

func serveProcess(dir string) error {
	port, err := strconv.Atoi(os.Getenv(serverPort))
	if err != nil {
		return err
	}
	ns, err := server.NewServer(&server.Options{
		ServerName: "process", Host: "127.0.0.1", Port: port, NoSigs: true,
		JetStream: true, StoreDir: dir, SyncAlways: true, NoLog: true,
	})
	if err != nil {
		return err
	}
	go ns.Start()
	if !ns.ReadyForConnections(10 * time.Second) {
		return fmt.Errorf("server is not ready")
	}
	fmt.Println(ns.ClientURL())
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// process is a NATS server that can be killed and started again.
type process struct {
	t     *testing.T
	dir   string
	port  string
	cmd   *exec.Cmd
	stdin io.Closer
	url   string
}

func startProcess(t *testing.T) *process {
	p := &process{t: t, dir: t.TempDir(), port: "-1"} // -1: any free port
	p.start()
	t.Cleanup(p.kill)
	return p
}

func (p *process) start() {
	p.t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), serverDir+"="+p.dir, serverPort+"="+p.port)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		p.t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		p.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		_ = cmd.Wait()
		p.t.Fatalf("server process printed nothing: %v", err)
	}
	p.cmd, p.stdin, p.url = cmd, stdin, strings.TrimSpace(line)
	if _, p.port, err = net.SplitHostPort(strings.TrimPrefix(p.url, "nats://")); err != nil {
		p.t.Fatal(err)
	}
}

// kill is kill -9.
func (p *process) kill() {
	if p.cmd == nil {
		return
	}
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	p.cmd = nil
}

func startServer(t *testing.T, dir string) *Server {
	t.Helper()
	s, err := StartServer(t.Context(), ServerOptions{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Shutdown)
	return s
}

func dial(s *Server) func(context.Context) (net.Conn, error) {
	return func(context.Context) (net.Conn, error) { return s.Dial() }
}

func connectTo(t *testing.T, o Options) *Log {
	t.Helper()
	l, err := Connect(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l
}

// newLog returns a created log on an embedded server, through its owner's connection.
func newLog(t *testing.T) (*Log, *Server) {
	t.Helper()
	s := startServer(t, t.TempDir())
	l := connectTo(t, s.OwnerOptions())
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	return l, s
}

// reopen connects again to the log of s.
func reopen(t *testing.T, s *Server) *Log {
	t.Helper()
	l := connectTo(t, Options{Dial: dial(s)})
	if _, _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	return l
}

func stamp() events.Stamp {
	return events.Stamp{ID: nuid.Next(), Source: "test", Time: time.Now()}
}

func created(t *testing.T, store string) events.Decision {
	t.Helper()
	return decision(t, events.Aggregate{}, events.StoreCreated{Store: store, Format: 1, Data: "file:///data"})
}

func decision(t *testing.T, agg events.Aggregate, body events.Body) events.Decision {
	t.Helper()
	d, err := events.NewDecision(stamp(), agg, body)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func fact(t *testing.T, iteration int) events.Fact {
	t.Helper()
	f, err := events.NewFact(stamp(), events.Scope{Run: "run.1", Trial: "t", Actor: events.Rank(0)},
		events.Metrics{Attempt: 1, Iteration: iteration, Step: int64(iteration), Metrics: map[string]any{"loss": "NaN"}})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func factsOf(t *testing.T, n int) []events.Fact {
	t.Helper()
	facts := make([]events.Fact, n)
	for i := range facts {
		facts[i] = fact(t, i+1)
	}
	return facts
}

var trial = events.Aggregate{Run: "run.1", Trial: "t"}

func begun(t *testing.T, name string) events.Decision {
	t.Helper()
	return decision(t, trial, events.CheckpointBegun{Attempt: 1, Checkpoint: name + ".a1", Name: name, WorldSize: 1, Participants: []int{0}})
}

// readAll reads a range that must exist.
func readAll(t *testing.T, l *Log, from, until uint64) []events.Recorded {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var all []events.Recorded
	for e, err := range l.Read(ctx, from, until) {
		if err != nil {
			t.Fatalf("after %d events: %v", len(all), err)
		}
		all = append(all, e)
	}
	return all
}

// readError returns the error that a read ends with, and the number of events before
// it.
func readError(t *testing.T, l *Log, from, until uint64) (int, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	n := 0
	for _, err := range l.Read(ctx, from, until) {
		if err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// lossy is a connection to the server that can swallow an acknowledgement or an answer.
type lossy struct {
	s      *Server
	mu     sync.Mutex
	prefix string // of the subject whose acknowledgement or answer is lost next
	cuts   int
}

func (d *lossy) loseNext(prefix string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.prefix = prefix
}

func (d *lossy) lost() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.cuts
}

func (d *lossy) dial(context.Context) (net.Conn, error) {
	c, err := d.s.Dial()
	return &lossyConn{Conn: c, d: d}, err
}

// lossyConn passes the publication on and breaks when its answer comes.
type lossyConn struct {
	net.Conn
	d      *lossy
	mu     sync.Mutex
	broken bool
}

func (c *lossyConn) Write(p []byte) (int, error) {
	c.d.mu.Lock()
	if c.d.prefix != "" && strings.Contains(string(p), "PUB "+c.d.prefix) {
		c.d.prefix = ""
		c.d.cuts++
		c.mu.Lock()
		c.broken = true
		c.mu.Unlock()
	}
	c.d.mu.Unlock()
	return c.Conn.Write(p)
}

func (c *lossyConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.broken {
		_ = c.Close()
		return 0, io.EOF
	}
	return n, err
}
