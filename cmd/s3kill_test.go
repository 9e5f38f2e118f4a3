package cmd_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/object/faultproxy"
	"github.com/ckptstore/ckptstore/internal/object/s3test"
	"github.com/ckptstore/ckptstore/tensor"
)

// savedEnv makes this program a rank that saves once.
const savedEnv = "CKPTSTORE_TEST_SAVE"

// savedBytes of a rank are three parts.
const (
	savedBytes = 65 << 20
	savedParts = 2 * 3
)

// finishing is the highest number of requests with which a save of two ranks is finished,
// without parts. Ten of them are those of the load that follows.
const finishing = 24

// saveOnce saves a state that depends on the run and the rank, or after a resumption checks it.
func saveOnce(ctx context.Context) error {
	c, err := client.Connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	want, run := make([]byte, savedBytes), crc32.ChecksumIEEE([]byte(os.Getenv("CKPTSTORE_RUN")))
	for i := 0; i < len(want); i += 8 {
		binary.LittleEndian.PutUint64(want[i:], uint64(i+c.Rank)*0x9e3779b97f4a7c15+uint64(run))
	}
	state := client.State{Tensors: []client.Tensor{{Data: want, Shard: tensor.Shard{
		FQN: "w", DType: tensor.Uint8, Global: tensor.Shape{2, savedBytes},
		Box: tensor.Box{Offsets: []int64{int64(c.Rank), 0}, Sizes: []int64{1, savedBytes}},
	}}}}
	if c.Resume == "" {
		s, err := c.Save(ctx, 1, state, client.SaveOptions{})
		if err != nil {
			return err
		}
		err = s.Wait(ctx, client.Committed)
		var aborted *client.AbortedError
		if os.Getenv(savedEnv) == "aborted" && errors.As(err, &aborted) {
			return c.Report(ctx, 2, map[string]any{"trains": "on"})
		}
		return err
	}
	state.Tensors[0].Data = make([]byte, savedBytes)
	if _, err := c.Load(ctx, &state, client.LoadOptions{Ref: c.Resume, Strict: true}); err != nil {
		return err
	}
	if !bytes.Equal(state.Tensors[0].Data, want) {
		return fmt.Errorf("rank %d: %s has other bytes than were saved", c.Rank, c.Resume)
	}
	return nil
}

// TestKilledAtEveryRequest kills the trainer at each request of a save to a bucket, before and
// after the server has acted. The next trainer of the run finishes the save, and sends only
// the parts that the server lacks, or the checkpoint does not exist and no upload is left.
func TestKilledAtEveryRequest(t *testing.T) {
	b := newBucketStore(t)
	proxy := b.proxy

	// The requests of a whole save, without those that open the store.
	whole := proxy.Inject(faultproxy.Fault{Match: ofRun("whole"), Do: faultproxy.Delay(0)})
	if out, err := b.job("whole").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	requests := whole.Hits()
	whole.Remove()
	if requests < savedParts+5 {
		t.Fatalf("a save has %d requests", requests)
	}

	resumed, killed, most := 0, 0, 0
	for k := range requests {
		for _, when := range []faultproxy.When{faultproxy.Before, faultproxy.After} {
			name := fmt.Sprintf("kill-%d-%d", k, when)
			cmd := b.job(name)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			fault := proxy.Inject(faultproxy.Fault{Match: ofRun(name), Skip: k, Times: 1, Do: faultproxy.Stop(when, func(faultproxy.Request) { _ = cmd.Process.Kill() })})
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			err := cmd.Wait()
			switch {
			case diedOf(cmd) == syscall.SIGKILL:
				killed++
			case err != nil:
				t.Fatalf("%s: %v\n%s", name, err, out.String())
			}
			waitGone(t, name)
			fault.Remove()
			proxy.Resume()

			missing := savedParts - b.parts(name)
			of := func(classes ...faultproxy.Class) *faultproxy.Injection {
				return proxy.Inject(faultproxy.Fault{Match: func(r faultproxy.Request) bool { return ofRun(name)(r) && slices.Contains(classes, r.Class) }, Do: faultproxy.Delay(0)})
			}
			parts, others := of(faultproxy.Part), of(faultproxy.List, faultproxy.Head, faultproxy.Put, faultproxy.Create, faultproxy.Complete, faultproxy.ListParts, faultproxy.Abort)
			again, err := b.job(name).CombinedOutput()
			if err != nil {
				t.Fatalf("%s, after the kill: %v\n%s\nbefore it:\n%s", name, err, again, out.String())
			}
			if !bytes.Contains(again, []byte("adopted staged save")) {
				continue
			}
			resumed++
			parts.Remove()
			others.Remove()
			most = max(most, others.Hits())
			if parts.Hits() > missing { // fewer if the server had yet to store one
				t.Errorf("%s: %d parts were sent after the kill, %d were missing", name, parts.Hits(), missing)
			}
			if bytes.Contains(again, []byte("checkpoint aborted")) {
				t.Errorf("%s: the save was not finished:\n%s", name, again)
			}
		}
	}
	t.Logf("%d requests a save, %d kills, %d saves finished by the next trainer with at most %d requests that are no parts", requests, killed, resumed, most)
	if most > finishing {
		t.Errorf("a save was finished with %d requests that are no parts, at most %d are allowed", most, finishing)
	}
	if killed < requests || resumed < requests/2 {
		t.Errorf("%d kills and %d finished saves of %d requests: too few", killed, resumed, requests)
	}
	b.run("ckptstore", "verify")
	// Of some uploads no trainer got the ID, or could record it.
	started := b.run("ckptstore", "events", "--type", "write.started", "--json")
	if !bytes.Contains(started, []byte("write.started")) {
		t.Fatalf("no upload is recorded: %s", started)
	}
	for _, left := range uploadsOf(t, b.server) {
		if bytes.Contains(started, []byte(filepath.Base(left))) {
			t.Errorf("an upload in the log is left: %s", left)
		}
	}
}

// TestUploadsOfAbortedSaves aborts saves whose trainers were killed while they uploaded. The
// next trainer removes what the server has of them. If it cannot, a collection does.
func TestUploadsOfAbortedSaves(t *testing.T) {
	b := newBucketStore(t)
	for _, refused := range []bool{false, true} {
		if refused && b.server.MinIO {
			t.Log("MinIO lists no uploads, so that a collection finds none")
			continue
		}
		name := fmt.Sprint("aborted-", refused)
		cmd := b.job(name)
		fault := b.proxy.Inject(faultproxy.Fault{Match: func(r faultproxy.Request) bool {
			return ofRun(name)(r) && r.Class == faultproxy.Complete
		}, Do: faultproxy.Stop(faultproxy.Before, func(faultproxy.Request) { _ = cmd.Process.Kill() })})
		if out, err := cmd.CombinedOutput(); diedOf(cmd) != syscall.SIGKILL {
			t.Fatalf("%v\n%s", err, out)
		}
		waitGone(t, name)
		fault.Remove()
		b.proxy.Resume()
		checkUploads(t, b.server, 2)
		b.run("ckptstore", "gc", "--apply") // the save is open: the next trainer may finish it
		checkUploads(t, b.server, 2)

		b.run("ckptstore", "gc", "--staging") // its bytes are lost
		if refused {
			fault = b.proxy.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Abort), Do: faultproxy.Refuse(http.StatusForbidden, "AccessDenied")})
		}
		if out, err := b.job(name).CombinedOutput(); err != nil || !bytes.Contains(out, []byte("checkpoint aborted")) {
			t.Fatalf("%v\n%s", err, out)
		} else if refused && !bytes.Contains(out, []byte("not discarded")) {
			t.Errorf("no warning of the uploads:\n%s", out)
		}
		if refused {
			checkUploads(t, b.server, 2)
			fault.Remove()
			if out := b.run("ckptstore", "gc"); !bytes.Contains(out, []byte("left by an aborted checkpoint")) {
				t.Errorf("a dry run does not show the checkpoint:\n%s", out)
			}
			checkUploads(t, b.server, 2)
			b.run("ckptstore", "gc", "--apply")
		}
		checkUploads(t, b.server, 0)
	}
	b.run("ckptstore", "verify")
}

// TestBucketThatRefuses saves to a server that asks for fewer requests, however few there are.
// The save is aborted by its deadline, with that reason, and the training continues.
func TestBucketThatRefuses(t *testing.T) {
	b := newBucketStore(t)
	b.proxy.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Part), Do: faultproxy.SlowDown()})
	cmd := b.command("trainer", "run", "--name", "refused", "--nproc", "2", "--save-timeout=3s", "--", os.Args[0])
	cmd.Env = append(cmd.Env, savedEnv+"=aborted")
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() != 1 {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{"request repeated", "SlowDown", "checkpoint aborted", "the workers ended well, but their last save, step-1.a1, was aborted"} {
		if !bytes.Contains(out, []byte(want)) {
			t.Errorf("%q is not in the output:\n%s", want, out)
		}
	}
	// Each part would be sent ten times, within a minute or two.
	if sent := b.proxy.Counts().Of(faultproxy.Part).Requests; sent >= 8*savedParts {
		t.Errorf("%d requests: the writes of the aborted save continued", sent)
	}
	if events := b.run("ckptstore", "events", "refused", "--type", "report.metrics"); !bytes.Contains(events, []byte("trains")) {
		t.Errorf("no report after the abort:\n%s", events)
	}
	checkUploads(t, b.server, 0)
}

// bucketStore is a store in a directory with its data in a bucket, behind a proxy.
type bucketStore struct {
	*testing.T
	server *s3test.Server
	proxy  *faultproxy.Proxy
	dir    string
	env    []string
}

func newBucketStore(t *testing.T) *bucketStore {
	t.Helper()
	server := s3test.Start(t, s3test.Options{})
	proxy, err := faultproxy.Start(faultproxy.Options{Target: server.Endpoint, Key: server.Key})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := proxy.Close(); err != nil {
			t.Error(err)
		}
	})
	b := &bucketStore{T: t, server: server, proxy: proxy, dir: filepath.Join(t.TempDir(), "store")}
	b.env = append(os.Environ(), "CKPTSTORE_STORE="+b.dir, "AWS_ACCESS_KEY_ID="+server.Key.Access, "AWS_SECRET_ACCESS_KEY="+server.Key.Secret,
		"AWS_REGION="+server.Region, "AWS_EC2_METADATA_DISABLED=true", "NO_COLOR=1")
	b.run("ckptstore", "init", "--data", "s3://"+server.Bucket+"/p?endpoint="+proxy.URL())
	return b
}

func (b *bucketStore) command(args ...string) *exec.Cmd {
	cmd := exec.CommandContext(b.Context(), args[0], args[1:]...)
	cmd.Env = b.env
	return cmd
}

// run runs a command that must succeed.
func (b *bucketStore) run(args ...string) []byte {
	b.Helper()
	out, err := b.command(args...).CombinedOutput()
	if err != nil {
		b.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// parts returns how many parts of a run's save the server has.
func (b *bucketStore) parts(name string) (n int) {
	b.Helper()
	sum := sha256.New // of a key: the server's name of its uploads
	for rank := range 2 {
		key := fmt.Sprintf("p/data/%s/main/step-1.a1/r%05d.safetensors", name, rank)
		if _, err := os.Stat(filepath.Join(b.server.Dir, key)); err == nil {
			n += savedParts / 2
			continue
		}
		h := sum()
		h.Write([]byte(key))
		found, err := filepath.Glob(filepath.Join(b.server.Dir, ".sgwtmp", "multipart", hex.EncodeToString(h.Sum(nil)), "*", "[0-9]*"))
		if err != nil {
			b.Fatal(err)
		}
		n += len(found)
	}
	return n
}

// job is a run of two ranks that save once.
func (b *bucketStore) job(name string) *exec.Cmd {
	cmd := b.command("trainer", "run", "--name", name, "--nproc", "2", "--grace=1s", "--", os.Args[0])
	cmd.Env = append(cmd.Env, savedEnv+"=1")
	return cmd
}

// ofRun chooses the requests for the files of a run.
func ofRun(name string) func(faultproxy.Request) bool {
	return func(r faultproxy.Request) bool {
		return strings.Contains(r.Key, "/"+name+"/") || strings.Contains(r.Query.Get("prefix"), "/"+name+"/")
	}
}

// uploadsLimit is how long a process may remove an upload in the background.
const uploadsLimit = 10 * time.Second

// checkUploads makes sure that the server has so many unfinished uploads.
func checkUploads(t *testing.T, server *s3test.Server, want int) {
	t.Helper()
	if server.MinIO {
		return // it keeps them elsewhere
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	over := time.After(uploadsLimit)
	for {
		got := uploadsOf(t, server)
		if len(got) == want {
			return
		}
		select {
		case <-tick.C:
		case <-over:
			t.Fatalf("%d unfinished uploads, want %d: %s", len(got), want, strings.Join(got, ", "))
		}
	}
}

// uploadsOf returns the directories of the unfinished uploads of versitygw, which end in their
// IDs.
func uploadsOf(t *testing.T, server *s3test.Server) []string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(server.Dir, ".sgwtmp", "multipart", "*", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return paths
}
