// Package s3test runs an S3 server for a test, as a process with a directory of its own.
//
// The server is versitygw, which the module in internal/object/servers pins: `task
// s3:servers` builds it. The environment variable CKPTSTORE_TEST_S3 has its path. Tests are
// skipped without it, or fail if CKPTSTORE_TEST_S3_REQUIRED is 1.
//
// versitygw keeps each object in a file, so that a test can damage its bytes. It refuses a
// key that continues another key after a slash, which S3 allows. A program named minio is run
// as MinIO, a second opinion: its objects are directories.
package s3test

import (
	"bytes"
	"context"
	"crypto/md5" //nolint:gosec // servers ask for it
	"encoding/base64"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/object/sigv4"
)

// Names of environment variables.
const (
	EnvServer   = "CKPTSTORE_TEST_S3"          // path of versitygw
	EnvRequired = "CKPTSTORE_TEST_S3_REQUIRED" // 1: a test without a server fails
)

const (
	startLimit   = 30 * time.Second
	requestLimit = time.Minute
	stopLimit    = 10 * time.Second
	attempts     = 5 // another process may take the port
)

// Options describe a server.
type Options struct {
	// Versioning keeps the old versions of objects in the bucket.
	Versioning bool

	// Lock makes a bucket with versions whose objects can be locked.
	Lock bool

	// Sidecar keeps the attributes of objects in files. It is used anyway on a filesystem
	// without extended attributes.
	Sidecar bool
}

// Server is a running server with one bucket.
type Server struct {
	Endpoint string // http://127.0.0.1:port
	Bucket   string
	Region   string
	Key      sigv4.Key
	Dir      string // has the objects, by their keys
	MinIO    bool   // not versitygw

	client http.Client
}

// Start starts a server with an empty bucket. It ends with the test, even if the test's
// process is killed.
func Start(tb testing.TB, o Options) *Server {
	tb.Helper()
	program := find(tb)
	base := tb.TempDir()
	s := &Server{Bucket: "bucket", Region: "us-east-1", Key: sigv4.Key{Access: "test-access", Secret: "test-secret-key"}}
	s.client = http.Client{Timeout: requestLimit, Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
	tb.Cleanup(s.client.CloseIdleConnections)
	s.MinIO = filepath.Base(program) == "minio"
	root := directory(tb, base, "root")
	s.Dir = filepath.Join(root, s.Bucket)
	if s.MinIO {
		s.run(tb, "/minio/health/ready", func(address string) *exec.Cmd { return s.minio(program, address, base, root) })
	} else {
		args := s.arguments(tb, base, root, o)
		s.run(tb, healthPath, func(address string) *exec.Cmd {
			cmd := exec.Command(program, append([]string{"--port", address}, args...)...)
			cmd.Env = []string{"HOME=" + base} // others could configure it
			return cmd
		})
	}
	s.make(tb, o)
	return s
}

// find returns the path of the program, or skips the test.
func find(tb testing.TB) string {
	tb.Helper()
	program := os.Getenv(EnvServer)
	if program == "" {
		text := EnvServer + " is not set: build a server with `go tool -modfile=tools.mod task s3:servers` and set it to the path that the task prints"
		if os.Getenv(EnvRequired) == "1" {
			tb.Fatalf("start an S3 server: %s, or unset %s", text, EnvRequired)
		}
		tb.Skip("no S3 server: " + text) //nolint:forbidigo // the server is built on request only, and CI sets EnvRequired
	}
	if _, err := exec.LookPath(program); err != nil {
		tb.Fatalf("start an S3 server: %s: %v; it must be the absolute path that `go tool -modfile=tools.mod task s3:servers` prints", EnvServer, err)
	}
	return program
}

// directory makes a directory of a server.
func directory(tb testing.TB, base, name string) string {
	tb.Helper()
	path := filepath.Join(base, name)
	if err := os.Mkdir(path, 0o700); err != nil {
		tb.Fatalf("start an S3 server: %v", err)
	}
	return path
}

// healthPath is the path at which versitygw answers without a signature. No bucket has its
// name.
const healthPath = "/-health"

// arguments returns the arguments of versitygw without the port.
func (s *Server) arguments(tb testing.TB, base, root string, o Options) []string {
	tb.Helper()
	args := []string{"--access", s.Key.Access, "--secret", s.Key.Secret, "--region", s.Region, "--keep-alive", "--quiet", "--health", healthPath, "posix"}
	if o.Sidecar || syscall.Setxattr(root, "user.ckptstore", []byte("probe"), 0) != nil {
		args = append(args, "--sidecar", directory(tb, base, "sidecar"))
	}
	if o.Versioning || o.Lock {
		args = append(args, "--versioning-dir", directory(tb, base, "versions"))
	}
	return append(args, root)
}

// minio returns the command of MinIO.
func (s *Server) minio(program, address, home, root string) *exec.Cmd {
	cmd := exec.Command(program, "server", "--quiet", "--address", address, root)
	cmd.Env = append(os.Environ(), "HOME="+home, "MINIO_ROOT_USER="+s.Key.Access, "MINIO_ROOT_PASSWORD="+s.Key.Secret,
		"MINIO_REGION="+s.Region, "MINIO_BROWSER=off", "MINIO_UPDATE=off", "MINIO_CI_CD=1")
	return cmd
}

// run starts a command on a free port and waits until it answers at a path.
func (s *Server) run(tb testing.TB, health string, command func(address string) *exec.Cmd) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startLimit)
	defer cancel()
	var last error
	for range attempts {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			tb.Fatalf("start an S3 server: %v", err)
		}
		address := l.Addr().String()
		_ = l.Close() // it accepted nothing
		s.Endpoint = "http://" + address
		p := start(command(address))
		if last = s.ready(ctx, p, health); last == nil {
			tb.Cleanup(func() {
				if err := p.kill(); err != nil {
					tb.Error(err)
				}
				if tb.Failed() {
					tb.Logf("output of the S3 server:\n%s", p.output.Bytes())
				}
			})
			return
		}
		last = errors.Join(last, p.kill())
		if ctx.Err() != nil {
			break
		}
	}
	tb.Fatalf("start an S3 server: %s: %v", os.Getenv(EnvServer), last)
}

// ready waits until the process answers.
func (s *Server) ready(ctx context.Context, p *process, health string) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.Endpoint+health, nil)
		if err != nil {
			return err
		}
		if answer, err := s.client.Do(r); err == nil {
			_ = answer.Body.Close()
			if answer.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-p.ended:
			if p.cmd.ProcessState == nil {
				return p.err // it was not started
			}
			return fmt.Errorf("it ended: %s; its output: %s", p.cmd.ProcessState, p.output.Bytes())
		case <-ctx.Done():
			return fmt.Errorf("not ready within %v; its output: %s", startLimit, p.output.Bytes())
		case <-tick.C:
		}
	}
}

// make makes the bucket.
func (s *Server) make(tb testing.TB, o Options) {
	tb.Helper()
	header := http.Header{}
	if o.Lock {
		header.Set("X-Amz-Bucket-Object-Lock-Enabled", "true")
	}
	a := s.Do(tb, http.MethodPut, "", header, nil)
	// MinIO is ready before its disks are.
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for until := time.Now().Add(startLimit); a.Status == http.StatusServiceUnavailable && time.Now().Before(until); <-tick.C {
		a = s.Do(tb, http.MethodPut, "", header, nil)
	}
	if a.Status != http.StatusOK {
		tb.Fatalf("make bucket %s: status %d: %s", s.Bucket, a.Status, a.Body)
	}
	if o.Versioning {
		s.Versions(tb, "Enabled")
	}
}

// Versions makes the bucket keep the versions of objects (Enabled), or stop it (Suspended).
func (s *Server) Versions(tb testing.TB, status string) {
	tb.Helper()
	s.configure(tb, "?versioning", `<VersioningConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Status>`+status+`</Status></VersioningConfiguration>`)
}

// Retain locks what is put into the bucket from now on for some days.
func (s *Server) Retain(tb testing.TB, days int) {
	tb.Helper()
	s.configure(tb, "?object-lock", fmt.Sprintf(`<ObjectLockConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><ObjectLockEnabled>Enabled</ObjectLockEnabled><Rule><DefaultRetention><Mode>COMPLIANCE</Mode><Days>%d</Days></DefaultRetention></Rule></ObjectLockConfiguration>`, days))
}

// Lock locks an object until a time.
func (s *Server) Lock(tb testing.TB, key string, until time.Time) {
	tb.Helper()
	s.configure(tb, "/"+key+"?retention", `<Retention xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Mode>COMPLIANCE</Mode><RetainUntilDate>`+until.UTC().Format(time.RFC3339)+`</RetainUntilDate></Retention>`)
}

// Hold begins or ends the legal hold of all versions of an object, also of one without a name: ON or
// OFF.
func (s *Server) Hold(tb testing.TB, key, status string) {
	tb.Helper()
	a := s.Do(tb, http.MethodGet, "?versions&prefix="+key, nil, nil)
	var list struct {
		Version []struct{ Key, VersionId string }
	}
	if err := xml.Unmarshal(a.Body, &list); err != nil || a.Status != http.StatusOK || len(list.Version) == 0 {
		tb.Fatalf("list versions of %s: status %d, %v: %s", key, a.Status, err, a.Body)
	}
	for _, v := range list.Version {
		if v.Key == key {
			s.hold(tb, key, v.VersionId, status)
		}
	}
}

func (s *Server) hold(tb testing.TB, key, version, status string) {
	tb.Helper()
	s.configure(tb, "/"+key+"?legal-hold&versionId="+version, `<LegalHold xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Status>`+status+`</Status></LegalHold>`)
}

// Expire makes objects with a prefix expire after a day. It reports false if the server has no such
// rules.
func (s *Server) Expire(tb testing.TB, prefix string) bool {
	tb.Helper()
	if a := s.Do(tb, http.MethodGet, "?lifecycle", nil, nil); a.Status == http.StatusNotImplemented {
		return false
	}
	s.configure(tb, "?lifecycle", `<LifecycleConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Rule><ID>expire</ID><Status>Enabled</Status><Filter><Prefix>`+prefix+`</Prefix></Filter><Expiration><Days>1</Days></Expiration></Rule></LifecycleConfiguration>`)
	return true
}

// configure puts a part of the configuration.
func (s *Server) configure(tb testing.TB, target, document string) {
	tb.Helper()
	sum := md5.Sum([]byte(document)) //nolint:gosec // servers ask for it
	header := http.Header{"Content-MD5": {base64.StdEncoding.EncodeToString(sum[:])}}
	if a := s.Do(tb, http.MethodPut, target, header, []byte(document)); a.Status != http.StatusOK {
		tb.Fatalf("put %s of bucket %s: status %d: %s", target, s.Bucket, a.Status, a.Body)
	}
}

// Answer is a server's answer.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// Do sends a signed request for a target in the bucket, such as "/key", "?versioning" or
// "/key?uploads". Its body is not signed. A request without an answer fails the test.
func (s *Server) Do(tb testing.TB, method, target string, header http.Header, body []byte) Answer {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), requestLimit)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, s.Endpoint+"/"+s.Bucket+target, bytes.NewReader(body))
	if err != nil {
		tb.Fatal(err)
	}
	for name, values := range header {
		r.Header[http.CanonicalHeaderKey(name)] = values
	}
	sigv4.Sign(r, s.Key, s.Region, sigv4.Unsigned, time.Now())
	answer, err := s.client.Do(r)
	if err != nil {
		tb.Fatalf("%s %s: %v", method, target, err)
	}
	defer answer.Body.Close()
	got, err := io.ReadAll(answer.Body)
	if err != nil {
		tb.Fatalf("%s %s: %v", method, target, err)
	}
	return Answer{answer.StatusCode, answer.Header, got}
}

// process is a running program.
type process struct {
	cmd     *exec.Cmd
	output  tail
	started chan struct{} // closed by the goroutine below
	ended   chan struct{} // closed when err is set
	err     error
}

// start starts a command that the kernel kills when this process ends.
func start(cmd *exec.Cmd) *process {
	p := &process{cmd: cmd, started: make(chan struct{}), ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	p.cmd.WaitDelay = stopLimit
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	go func() {
		// The signal is sent when the thread ends that has started the program.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(p.ended)
		p.err = p.cmd.Start()
		close(p.started)
		if p.err == nil {
			p.err = p.cmd.Wait()
		}
	}()
	return p
}

// kill ends the process, and returns when it has ended.
func (p *process) kill() error {
	<-p.started // a fork, which does not block
	if p.cmd.Process != nil {
		_ = p.cmd.Process.Kill() // fails if it has ended
	}
	select {
	case <-p.ended:
		return nil
	case <-time.After(2 * stopLimit):
		return fmt.Errorf("end the S3 server: process %d still runs %v after it was killed", p.cmd.Process.Pid, 2*stopLimit)
	}
}

// tail keeps the last bytes written to it.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	if over := len(t.text) - 64<<10; over > 0 {
		t.text = append(t.text[:0], t.text[over:]...)
	}
	return len(p), nil
}

// Bytes returns a copy of what is kept.
func (t *tail) Bytes() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return bytes.Clone(t.text)
}
