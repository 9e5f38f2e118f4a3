package objecttest

import (
	"testing"

	"github.com/ckptstore/ckptstore/internal/object"
)

func TestBucket(t *testing.T) { Test(t, func(testing.TB) object.Backend { return NewBucket() }) }
