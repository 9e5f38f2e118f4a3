package gpu

import "context"

// System is this machine's devices, for who asks for them by an interface of
// his own. Its methods are the functions of the same names.
type System struct{}

// Inspect calls [Inspect].
func (System) Inspect(ctx context.Context) (Inventory, error) { return Inspect(ctx) }

// Watch calls [Watch].
func (System) Watch(ctx context.Context, told func(Event)) error { return Watch(ctx, told) }

// HoldersOf calls [HoldersOf].
func (System) HoldersOf(ctx context.Context, pids ...int) ([]Holder, error) {
	return HoldersOf(ctx, pids...)
}
