package cmd_test

import (
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/ckptstore/ckptstore/internal/object/s3test"
)

// TestBucketScripts runs testdata/s3 as [TestScripts] does its scripts, with an S3 server. $DATA
// is the URL of an empty prefix, and the credentials are in the environment.
func TestBucketScripts(t *testing.T) {
	server := s3test.Start(t, s3test.Options{})
	params := scripts(filepath.Join("testdata", "s3"))
	setup := params.Setup
	params.Setup = func(e *testscript.Env) error {
		e.Setenv("AWS_ACCESS_KEY_ID", server.Key.Access)
		e.Setenv("AWS_SECRET_ACCESS_KEY", server.Key.Secret)
		e.Setenv("AWS_REGION", server.Region)
		e.Setenv("AWS_EC2_METADATA_DISABLED", "true")
		e.Setenv("SERVER", server.Endpoint)
		e.Setenv("OBJECTS", server.Dir)
		e.Setenv("DATA", "s3://"+server.Bucket+"/"+filepath.Base(e.WorkDir)+"?endpoint="+server.Endpoint)
		e.Setenv("PREFIX", filepath.Base(e.WorkDir))
		return setup(e)
	}
	testscript.Run(t, params)
}
