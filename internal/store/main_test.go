package store

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/natstest"
)

// The test binary is also every other process of these tests: with roleEnv set it executes the
// requests on its standard input until that ends.
const roleEnv = "CKPTSTORE_TEST_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		if err := play(role); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// These tests wait for the disk and for other processes more than they compute. The command
	// line overrides this number.
	err := flag.Set("test.parallel", "8")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	// Their garbage consists of log blocks, large and read once.
	debug.SetGCPercent(400)
	if short, err = os.MkdirTemp("", "ck"); err == nil {
		// With the race detector, every process would sleep for a second before
		// it ends.
		err = errors.Join(os.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE")), os.Chmod(short, 0o711), os.Mkdir(filepath.Join(short, "run"), 0o700),
			os.Setenv("XDG_RUNTIME_DIR", filepath.Join(short, "run")))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, append(natstest.Leftovers(), natstest.RemoveAndExit(short))...)
}

// short is a directory whose path is short enough for sockets and that other users may pass
// through.
var short string

var shorts atomic.Int64

// shortDir returns a new directory in short.
func shortDir(t *testing.T, name string) string {
	t.Helper()
	dir := filepath.Join(short, fmt.Sprint(shorts.Add(1)), name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// limit bounds every wait of these tests; only a failure reaches it.
const limit = 2 * time.Minute

// request is a line to a process, reply a line from it.
type request struct {
	Do       string        `json:"do"`
	Location string        `json:"location,omitempty"`
	Data     string        `json:"data,omitempty"`
	Patience time.Duration `json:"patience,omitempty"`
	Run      string        `json:"run,omitempty"`
	Name     string        `json:"name,omitempty"` // of a query, a prefix of IDs, a job
	Count    int           `json:"count,omitempty"`
	Term     time.Duration `json:"term,omitempty"` // of leases
}

type reply struct {
	Acknowledged string          `json:"acknowledged,omitempty"` // ID of an event; not an answer to a request
	Error        string          `json:"error,omitempty"`
	Is           []string        `json:"is,omitempty"` // sentinels that the error is
	Text         string          `json:"text,omitempty"`
	Data         json.RawMessage `json:"data,omitempty"`
}

// sentinels are the errors that processes can send to each other.
var sentinels = map[string]error{
	"no store": ErrNoStore, "foreign": ErrForeign, "newer": ErrNewer, "damaged": ErrDamaged,
	"locked": ErrLocked, "exists": ErrExists, "lease lost": ErrLeaseLost,
}

func failed(err error) reply {
	r := reply{Error: err.Error()}
	for name, sentinel := range sentinels {
		if errors.Is(err, sentinel) {
			r.Is = append(r.Is, name)
		}
	}
	return r
}

// process is another test process.
type process struct {
	t       *testing.T
	cmd     *exec.Cmd
	stdin   io.WriteCloser
	replies chan reply
	read    chan struct{} // closed when its standard output has ended

	mu    sync.Mutex
	acked []string
}

// start starts a process. At the end of the test it must be killed or ended.
func start(t *testing.T, role string, env ...string) *process {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), append(env, roleEnv+"="+role)...)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, cmd: cmd, stdin: stdin, replies: make(chan reply, 1), read: make(chan struct{})}
	go p.listen(stdout)
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			p.signal(syscall.SIGKILL)
			<-p.read
			_ = cmd.Wait()
		}
	})
	return p
}

func (p *process) listen(stdout io.Reader) {
	defer close(p.read)
	lines := bufio.NewScanner(stdout)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var r reply
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return // cut by a kill
		}
		if r.Acknowledged == "" {
			p.replies <- r
			continue
		}
		p.mu.Lock()
		p.acked = append(p.acked, r.Acknowledged)
		p.mu.Unlock()
	}
}

// acknowledged returns the IDs of all events that were acknowledged to the process.
func (p *process) acknowledged() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.acked[:len(p.acked):len(p.acked)]
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) tell(r request) {
	p.t.Helper()
	line, err := json.Marshal(r)
	if err != nil {
		p.t.Fatal(err)
	}
	if _, err := p.stdin.Write(append(line, '\n')); err != nil {
		p.t.Fatalf("%s: %v", r.Do, err)
	}
}

func (p *process) hear(what string) reply {
	p.t.Helper()
	select {
	case r := <-p.replies:
		return r
	case <-p.read:
		p.t.Fatalf("%s: process %d is gone", what, p.pid())
	case <-time.After(limit):
		p.t.Fatalf("%s: process %d does not answer", what, p.pid())
	}
	return reply{}
}

// try makes a request; do makes a request that must succeed.
func (p *process) try(r request) reply {
	p.t.Helper()
	p.tell(r)
	return p.hear(r.Do)
}

func (p *process) do(r request) reply {
	p.t.Helper()
	got := p.try(r)
	if got.Error != "" {
		p.t.Fatalf("%s in process %d: %s", r.Do, p.pid(), got.Error)
	}
	return got
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Error(err)
	}
	if s != syscall.SIGSTOP {
		return
	}
	// Until all of its threads have stopped, a thread may still answer.
	var err error = syscall.EINTR
	for errors.Is(err, syscall.EINTR) {
		err = unix.Waitid(unix.P_PID, p.cmd.Process.Pid, nil, unix.WSTOPPED, nil)
	}
	if err != nil {
		p.t.Error(err)
	}
}

// kill sends SIGKILL and reads the remaining output.
func (p *process) kill() {
	p.t.Helper()
	p.signal(syscall.SIGKILL)
	<-p.read
	_ = p.cmd.Wait()
}

// end lets the process end in order; it must leave nothing running.
func (p *process) end() {
	p.t.Helper()
	if err := p.stdin.Close(); err != nil {
		p.t.Error(err)
	}
	stuck := time.AfterFunc(limit, func() { _ = p.cmd.Process.Signal(syscall.SIGQUIT) })
	defer stuck.Stop()
	<-p.read
	if err := p.cmd.Wait(); err != nil {
		p.t.Errorf("process %d: %v", p.pid(), err)
	}
}

// eventually waits for something that another process does.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("%s: not within %s", what, limit)
		}
	}
}
