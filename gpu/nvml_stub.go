//go:build !cgo || !linux

package gpu

import (
	"context"
	"fmt"
)

// List returns [ErrNotBuilt]: this build cannot call NVML.
func List(ctx context.Context) ([]Device, error) { return nil, notBuilt(ctx, "list GPUs") }

// Inspect returns [ErrNotBuilt]: this build cannot call NVML.
func Inspect(ctx context.Context) (Inventory, error) {
	return Inventory{}, notBuilt(ctx, "inspect GPUs")
}

// systemHolders returns [ErrNotBuilt]: this build cannot call NVML.
func systemHolders(ctx context.Context, _ ...int) ([]Holder, error) {
	return nil, notBuilt(ctx, "find holders of GPU memory")
}

// Watch returns [ErrNotBuilt]: this build cannot call NVML.
func Watch(ctx context.Context, _ func(Event)) error { return notBuilt(ctx, "watch GPUs") }

func notBuilt(ctx context.Context, what string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return fmt.Errorf("%s: %w", what, ErrNotBuilt)
}
