package cmd_test

import (
	"bytes"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/ckptstore/ckptstore/internal/object/faultproxy"
	"github.com/ckptstore/ckptstore/internal/object/s3test"
)

// TestBucketScripts runs testdata/s3 as [TestScripts] does its scripts, with an S3 server. $DATA
// is the URL of an empty prefix, and the credentials are in the environment.
func TestBucketScripts(t *testing.T) {
	runBucketScripts(t, "s3", s3test.Start(t, s3test.Options{}))
}

// TestVersionedBucketScripts runs testdata/s3versions in a bucket that keeps versions.
func TestVersionedBucketScripts(t *testing.T) {
	runBucketScripts(t, "s3versions", s3test.Start(t, s3test.Options{Versioning: true}))
}

// TestLockedBucketScripts runs testdata/s3locks in a bucket whose objects can be locked, and
// testdata/s3retention in a bucket that locks each of them.
func TestLockedBucketScripts(t *testing.T) {
	runBucketScripts(t, "s3locks", s3test.Start(t, s3test.Options{Lock: true}))
	retains := s3test.Start(t, s3test.Options{Lock: true})
	retains.Retain(t, 1)
	runBucketScripts(t, "s3retention", retains)
}

func runBucketScripts(t *testing.T, dir string, server *s3test.Server) {
	t.Helper()
	params := scripts(filepath.Join("testdata", dir))
	params.Cmds["bucket"] = func(ts *testscript.TestScript, neg bool, args []string) {
		if neg || len(args) < 2 {
			ts.Fatalf("usage: bucket list|hold|release|lock|put|hide KEY")
		}
		bucketCommand(t, ts, server, args[0], args[1])
	}
	denies, err := faultproxy.Start(faultproxy.Options{Target: server.Endpoint, Key: server.Key})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := denies.Close(); err != nil {
			t.Error(err)
		}
	})
	denies.Inject(faultproxy.Fault{
		Match: func(r faultproxy.Request) bool { return r.Query.Has("versions") },
		Do:    faultproxy.Refuse(http.StatusForbidden, "AccessDenied"),
	})
	setup := params.Setup
	params.Setup = func(e *testscript.Env) error {
		e.Vars = append(e.Vars, bucketEnv(server)...)
		e.Setenv("SERVER", server.Endpoint)
		e.Setenv("DENIES", denies.URL()) // the server, for a client that may not list versions
		e.Setenv("OBJECTS", server.Dir)
		e.Setenv("DATA", "s3://"+server.Bucket+"/"+filepath.Base(e.WorkDir)+"?endpoint="+server.Endpoint)
		e.Setenv("PREFIX", filepath.Base(e.WorkDir))
		return setup(e)
	}
	testscript.Run(t, params)
}

// bucketCommand does one thing to a server, other than the program does.
func bucketCommand(t *testing.T, ts *testscript.TestScript, server *s3test.Server, do, key string) {
	t.Helper()
	switch do {
	case "list": // the versions and markers of keys that begin so, into the file versions
		a := server.Do(t, http.MethodGet, "?versions&prefix="+key, nil, nil)
		ts.Check(os.WriteFile(ts.MkAbs("versions"), bytes.ReplaceAll(a.Body, []byte("<Key>"), []byte("\n<Key>")), 0o600))
	case "hold":
		server.Hold(t, key, "ON")
	case "release":
		server.Hold(t, key, "OFF")
	case "lock":
		server.Lock(t, key, time.Now().Add(time.Hour))
	case "put":
		if a := server.Do(t, http.MethodPut, "/"+key, nil, make([]byte, 1<<20)); a.Status != http.StatusOK {
			ts.Fatalf("put %s: status %d: %s", key, a.Status, a.Body)
		}
	case "hide":
		if a := server.Do(t, http.MethodDelete, "/"+key, nil, nil); a.Status != http.StatusNoContent {
			ts.Fatalf("delete %s: status %d: %s", key, a.Status, a.Body)
		}
	default:
		ts.Fatalf("bucket %s is unknown", do)
	}
}

// bucketEnv is the environment of a server's clients.
func bucketEnv(server *s3test.Server) []string {
	return []string{
		"AWS_ACCESS_KEY_ID=" + server.Key.Access, "AWS_SECRET_ACCESS_KEY=" + server.Key.Secret, "AWS_REGION=" + server.Region,
		"AWS_EC2_METADATA_DISABLED=true",
	}
}

// pageBucket is the URL of the pages' bucket.
const pageBucket = "s3://models/team?region=eu-central-1"

// TestBucketPages runs the blocks with a bucket as [TestUserPages] does the others, with an S3 server
// in the place of Amazon's.
func TestBucketPages(t *testing.T) {
	t.Parallel()
	server := s3test.Start(t, s3test.Options{})
	for name, page := range map[string]string{
		"README": filepath.Join("..", "README.md"), "object-storage": filepath.Join("..", "docs", "howto", "object-storage.md"),
	} {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var blocks []block
			for _, b := range blocksOf(string(text)) {
				if b.inBucket() {
					b.script = strings.ReplaceAll(b.script, pageBucket, "s3://"+server.Bucket+"/"+name+"?endpoint="+server.Endpoint)
					blocks = append(blocks, b)
				}
			}
			if len(blocks) == 0 {
				t.Fatalf("%s has no block with %s", page, pageBucket)
			}
			checkPage(t, blocks, runPage(t, blocks, bucketEnv(server)...))
		})
	}
}
