package backendtest

import (
	"testing"

	"github.com/ckptstore/ckptstore/storage/backend"
)

func TestBucket(t *testing.T) { Test(t, func(testing.TB) backend.Backend { return NewBucket() }) }
