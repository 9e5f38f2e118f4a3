package local_test

import (
	"path/filepath"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/storage/backend"
	"github.com/ckptstore/ckptstore/storage/backend/backendtest"
	"github.com/ckptstore/ckptstore/storage/backend/local"
)

func TestDisk(t *testing.T) {
	backendtest.Test(t, func(t testing.TB) backend.Backend {
		return local.New(vfs.Default, filepath.Join(t.TempDir(), "store", "data"))
	})
}

func TestMemory(t *testing.T) {
	backendtest.Test(t, func(testing.TB) backend.Backend { return local.New(vfs.NewMem(), "store/data") })
}
