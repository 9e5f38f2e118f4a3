package cmd_test

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/store"
)

// contained prepares a program that a shell starts in namespaces of its own, after it has run
// set. The program is the first process there.
func contained(t *testing.T, dir string, out *transcript, env []string, set string, program ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "sh", append([]string{"-c", set + ` && exec "$0" "$@"`}, program...)...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, out, out
	cmd.Env = append(append(os.Environ(), "XDG_STATE_HOME="+filepath.Join(dir, ".state")), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS}
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

// privateMounts keeps the mounts of a contained program from other namespaces.
const privateMounts = "mount --make-rprivate / && mount -t proc proc /proc"

// As the command of a container, the trainer reaps what its workers leave, and a signal to
// the first process preempts the job.
func TestTrainerIsFirst(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var out transcript
	worker := `
		(sleep 0.1 & echo $! >orphan)
		for i in $(seq 200); do
			[ -e /proc/$(cat orphan) ] || { echo orphan is reaped; exit 0; }
			sleep 0.1
		done
		cat /proc/$(cat orphan)/stat; exit 1`
	cmd := contained(t, dir, &out, nil, privateMounts, "trainer", "run", "-q", "--max-restarts", "0", "--name", "orphan", "--", "sh", "-c", worker)
	if err := cmd.Run(); err != nil || !strings.Contains(out.String(), "orphan is reaped") {
		t.Errorf("%v\n%s", err, out.String())
	}
	var saved transcript
	cmd = contained(t, dir, &saved, nil, privateMounts, "trainer", "run", "--name", "saved", "--", "trainer", "demo-worker", "--steps", "10000000", "--save-every", "100")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	for signaled := false; ; {
		select {
		case err := <-done:
			if code := cmd.ProcessState.ExitCode(); !errors.As(err, new(*exec.ExitError)) || code != 75 || !strings.Contains(saved.String(), "preempted (told to stop by SIGTERM)") {
				t.Errorf("exit code %d, want 75\n%s", code, saved.String())
			}
			return
		case <-time.After(50 * time.Millisecond):
			if !signaled && strings.Contains(saved.String(), "checkpoint committed") {
				signaled = true
				if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
					t.Error(err)
				}
			}
		}
	}
}

// The annotation of the pod has the newest commit.
func TestLastCommitIsPublished(t *testing.T) {
	t.Parallel()
	patches := make(chan string, 100)
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		patches <- fmt.Sprint(r.Method, " ", r.URL.Path, " ", r.Header.Get("Authorization"), " ", string(body))
		w.WriteHeader(http.StatusOK)
	}))
	defer server.Close()
	host, port, err := net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for file, text := range map[string]string{
		"namespace": "team", "token": "secret-of-the-pod", "ca.crt": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})),
	} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const account = "/run/secrets/kubernetes.io/serviceaccount"
	set := privateMounts + " && mount -t tmpfs tmpfs /run && mkdir -p " + account + " && cp namespace token ca.crt " + account
	var out transcript
	cmd := contained(t, dir, &out, []string{"KUBERNETES_SERVICE_HOST=" + host, "KUBERNETES_SERVICE_PORT=" + port}, set,
		"trainer", "run", "--name", "bert", "--annotate-pod", "bert-0-x7x2f", "--", "trainer", "demo-worker", "--steps", "40", "--save-every", "20")
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	close(patches)
	last := ""
	for last = range patches {
	}
	want := `PATCH /api/v1/namespaces/team/pods/bert-0-x7x2f Bearer secret-of-the-pod {"metadata":{"annotations":{"ckptstore/last-commit":"{\"run\":\"bert\",\"checkpoint\":\"step-40.a1\",\"step\":40,\"time\":`
	if !strings.HasPrefix(last, want) {
		t.Errorf("last request %s, want %s…\n%s", last, want, out.String())
	}
}

// lateNames prepares files in place of /etc/hosts and /etc/resolv.conf, where no name is known
// but localhost. It returns the path of the first, and a shell command that mounts both.
func lateNames(t *testing.T, dir string) (names, mount string) {
	t.Helper()
	names, servers := filepath.Join(dir, "hosts"), filepath.Join(dir, "resolv.conf")
	for file, text := range map[string]string{names: "127.0.0.1 localhost\n", servers: "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"} {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return names, fmt.Sprintf("%s && mount --bind %s /etc/hosts && mount --bind %s /etc/resolv.conf", privateMounts, names, servers)
}

// A trainer waits for the name of the server of its store.
func TestLateNameOfStore(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	output(t, 0, "ckptstore", "init", "--store", filepath.Join(dir, "ckpts"))
	const token = store.EnvToken + "=late-name-of-a-store-3f9a3f9a3f9a3f9a3f9a"
	var served, out transcript
	serve := exec.CommandContext(t.Context(), "ckptstore", "serve", "--store", filepath.Join(dir, "ckpts"), "--listen", "127.0.0.1:0")
	serve.Env, serve.Stderr = append(os.Environ(), token), &served
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = serve.Process.Signal(syscall.SIGTERM); _ = serve.Wait() }()
	var at []string
	for end := time.Now().Add(time.Minute); at == nil && time.Now().Before(end); <-time.After(20 * time.Millisecond) {
		at = regexp.MustCompile(`nats://127.0.0.1(:\d+)`).FindStringSubmatch(served.String())
	}
	if at == nil {
		t.Fatalf("serve does not listen: %s", served.String())
	}
	names, mount := lateNames(t, dir)
	cmd := contained(t, dir, &out, []string{"GODEBUG=netdns=go", token}, mount,
		"trainer", "run", "--wait", "1m", "--store", "nats://late-store"+at[1], "--name", "a", "--", "trainer", "demo-worker", "--steps", "20", "--save-every", "20")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	for known := false; ; {
		select {
		case err := <-done:
			if err != nil || !known || !strings.Contains(out.String(), "checkpoint committed") {
				t.Errorf("%v; the name is known: %v\n%s", err, known, out.String())
			}
			return
		case <-time.After(50 * time.Millisecond):
			if !known && strings.Contains(out.String(), "name of the store's server is unknown") {
				known = true
				if err := os.WriteFile(names, []byte("127.0.0.1 localhost late-store\n"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// The name of an endpoint that name servers learn late is waited for. A pod whose name it is
// does not wait: it coordinates at once. Any other machine coordinates when the name leads to it.
func TestLateName(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		env    []string
		before string // what the trainers print before the name is known
	}{
		"a pod":     {[]string{"KUBERNETES_SERVICE_HOST=10.96.0.1", "CKPTSTORE_TERMINATION_LOG=none"}, "waiting for nodes"},
		"a machine": {nil, "endpoint does not answer"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			at, err := freeEndpoint(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			names, mount := lateNames(t, dir)
			const name = "late-0.late"
			var out [2]transcript
			done := make(chan int)
			for rank := range out {
				set := fmt.Sprintf("%s && hostname late-%d", mount, rank)
				cmd := contained(t, dir, &out[rank], append([]string{"GODEBUG=netdns=go", fmt.Sprint("JOB_COMPLETION_INDEX=", rank)}, c.env...), set,
					"trainer", "run", "--name", "late", "--nnodes", "2", "--rdzv-endpoint", strings.Replace(at, "127.0.0.1", name, 1), "--broadcast=false", "--", "sh", "-c", "echo rank $RANK trains")
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				go func() { _ = cmd.Wait(); done <- cmd.ProcessState.ExitCode() }()
			}
			printed := func() string { return out[0].String() + "\n" + out[1].String() }
			for known, left := false, len(out); left > 0; {
				select {
				case code := <-done:
					left--
					if code != 0 || !known {
						t.Errorf("a trainer ended with %d; the name is known: %v\n%s", code, known, printed())
					}
				case <-time.After(50 * time.Millisecond):
					if !known && strings.Contains(printed(), c.before) {
						known = true
						if err := os.WriteFile(names, []byte("127.0.0.1 localhost "+name+"\n"), 0o644); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			for rank := range out {
				if !strings.Contains(printed(), fmt.Sprintf("rank %d trains", rank)) {
					t.Errorf("rank %d did not train\n%s", rank, printed())
				}
			}
			if strings.Contains(printed(), "unknown here") {
				t.Errorf("the coordinator warns of its own name\n%s", printed())
			}
		})
	}
}
