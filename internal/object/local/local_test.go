package local_test

import (
	"path/filepath"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/local"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"
)

func TestDisk(t *testing.T) {
	objecttest.Test(t, func(t testing.TB) object.Backend {
		return local.New(vfs.Default, filepath.Join(t.TempDir(), "store", "data"))
	})
}

func TestMemory(t *testing.T) {
	objecttest.Test(t, func(testing.TB) object.Backend { return local.New(vfs.NewMem(), "store/data") })
}
