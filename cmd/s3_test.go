package cmd_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/ckptstore/ckptstore/internal/object/s3test"
)

// TestBucketScripts runs testdata/s3 as [TestScripts] does its scripts, with an S3 server. $DATA
// is the URL of an empty prefix, and the credentials are in the environment.
func TestBucketScripts(t *testing.T) { runBucketScripts(t, "s3", s3test.Options{}) }

// TestVersionedBucketScripts runs testdata/s3versions in a bucket that keeps versions.
func TestVersionedBucketScripts(t *testing.T) {
	runBucketScripts(t, "s3versions", s3test.Options{Versioning: true})
}

func runBucketScripts(t *testing.T, dir string, options s3test.Options) {
	t.Helper()
	server := s3test.Start(t, options)
	params := scripts(filepath.Join("testdata", dir))
	setup := params.Setup
	params.Setup = func(e *testscript.Env) error {
		e.Vars = append(e.Vars, bucketEnv(server)...)
		e.Setenv("SERVER", server.Endpoint)
		e.Setenv("OBJECTS", server.Dir)
		e.Setenv("DATA", "s3://"+server.Bucket+"/"+filepath.Base(e.WorkDir)+"?endpoint="+server.Endpoint)
		e.Setenv("PREFIX", filepath.Base(e.WorkDir))
		return setup(e)
	}
	testscript.Run(t, params)
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

// TestBucketPages runs the blocks with a bucket as [TestPages] does the others, with an S3 server
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
