//go:build !cgo || !linux

package gpu

import (
	"context"
	"fmt"
)

// List returns [ErrNotBuilt]: this build cannot ask NVML.
func List(ctx context.Context) ([]Device, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("list GPUs: %w", err)
	}
	return nil, fmt.Errorf("list GPUs: %w", ErrNotBuilt)
}
