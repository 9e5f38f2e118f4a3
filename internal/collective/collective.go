package collective

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
)

const (
	sizeBytes = 8
	// unencodable is the size that a rank announces when it has no bytes.
	unencodable = math.MaxUint64
)

// AllGatherObject returns the objects of all ranks in rank order, on every rank.
// In a group of one rank that is v itself, not encoded. A []byte is sent as it
// is; nil arrives as an empty slice.
//
// An object that cannot be encoded, or is larger than [Options.MaxBytes], is an
// error on every rank, which names the object's rank. The group stays usable.
// Nothing is allocated for sizes over that limit.
func AllGatherObject[T any](ctx context.Context, g *Group, v T) ([]T, error) {
	if g.Size() == 1 {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("gather objects: %w", err)
		}
		return []T{v}, nil
	}
	own, encodeErr := encode(g, v)
	parts, err := g.allGather(ctx, own, encodeErr)
	if err != nil {
		return nil, fmt.Errorf("gather objects on rank %d: %w", g.Rank(), err)
	}
	objects := make([]T, len(parts))
	for rank, part := range parts {
		if objects[rank], err = decode[T](g, part); err != nil {
			return nil, fmt.Errorf("gather objects on rank %d: decode object of rank %d (%d bytes): %w", g.Rank(), rank, len(part), err)
		}
	}
	return objects, nil
}

// BroadcastObject returns root's object on every rank; the v of other ranks is
// ignored. In a group of one rank that is v itself, not encoded. Errors are as
// with [AllGatherObject].
func BroadcastObject[T any](ctx context.Context, g *Group, root int, v T) (T, error) {
	var none T
	if root < 0 || root >= g.Size() {
		return none, fmt.Errorf("broadcast object on rank %d: root %d is not in 0..%d", g.Rank(), root, g.Size()-1)
	}
	if g.Size() == 1 {
		if err := ctx.Err(); err != nil {
			return none, fmt.Errorf("broadcast object: %w", err)
		}
		return v, nil
	}
	var own []byte
	var encodeErr error
	if g.Rank() == root {
		own, encodeErr = encode(g, v)
	}
	data, err := g.broadcast(ctx, root, own, encodeErr)
	if err != nil {
		return none, fmt.Errorf("broadcast object of rank %d on rank %d: %w", root, g.Rank(), err)
	}
	if g.Rank() == root {
		return v, nil
	}
	object, err := decode[T](g, data)
	if err != nil {
		return none, fmt.Errorf("broadcast object of rank %d on rank %d: decode %d bytes: %w", root, g.Rank(), len(data), err)
	}
	return object, nil
}

// AllGatherBytes returns the bytes of all ranks in rank order, on every rank;
// lengths may differ. The caller owns the result, and own is not retained. Errors
// are as with [AllGatherObject].
func (g *Group) AllGatherBytes(ctx context.Context, own []byte) ([][]byte, error) {
	if g.Size() == 1 {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("gather bytes: %w", err)
		}
		return [][]byte{bytes.Clone(own)}, nil
	}
	parts, err := g.allGather(ctx, own, nil)
	if err != nil {
		return nil, fmt.Errorf("gather bytes on rank %d: %w", g.Rank(), err)
	}
	return parts, nil
}

// allGather is the protocol of both gathers. encodeErr is the reason why this
// rank has nothing to send.
func (g *Group) allGather(ctx context.Context, own []byte, encodeErr error) ([][]byte, error) {
	ctx, end, err := g.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	announced, err := g.t.AllGather(ctx, announce(own, encodeErr))
	if err != nil {
		return nil, g.breaks(fmt.Errorf("sizes: %w", err))
	}
	if err := g.check(announced, sizeBytes); err != nil {
		return nil, g.breaks(fmt.Errorf("sizes: %w", err))
	}
	if encodeErr != nil {
		return nil, fmt.Errorf("encode object: %w", encodeErr)
	}
	sizes := make([]int, len(announced))
	for rank, b := range announced {
		if sizes[rank], err = g.size(rank, binary.LittleEndian.Uint64(b)); err != nil {
			return nil, err
		}
	}
	largest := slices.Max(sizes)
	if largest == 0 {
		parts := make([][]byte, len(sizes))
		for rank := range parts {
			parts[rank] = []byte{}
		}
		return parts, nil
	}
	parts, err := g.t.AllGather(ctx, pad(own, largest))
	if err != nil {
		return nil, g.breaks(fmt.Errorf("%d bytes a rank: %w", largest, err))
	}
	if err := g.check(parts, largest); err != nil {
		return nil, g.breaks(err)
	}
	for rank, size := range sizes {
		parts[rank] = parts[rank][:size:size]
	}
	return parts, nil
}

// broadcast is the protocol of [BroadcastObject].
func (g *Group) broadcast(ctx context.Context, root int, own []byte, encodeErr error) ([]byte, error) {
	ctx, end, err := g.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	first := make([]byte, sizeBytes)
	if g.Rank() == root {
		first = announce(own, encodeErr)
	}
	announced, err := g.t.Broadcast(ctx, root, first)
	if err != nil {
		return nil, g.breaks(fmt.Errorf("size: %w", err))
	}
	if len(announced) != sizeBytes {
		return nil, g.breaks(fmt.Errorf("size: the transport gave %d bytes, want %d", len(announced), sizeBytes))
	}
	if encodeErr != nil {
		return nil, fmt.Errorf("encode object: %w", encodeErr)
	}
	size, err := g.size(root, binary.LittleEndian.Uint64(announced))
	if err != nil {
		return nil, err
	}
	if size == 0 {
		return []byte{}, nil
	}
	if g.Rank() != root {
		own = make([]byte, size)
	}
	data, err := g.t.Broadcast(ctx, root, own)
	if err != nil {
		return nil, g.breaks(fmt.Errorf("%d bytes: %w", size, err))
	}
	if len(data) != size {
		return nil, g.breaks(fmt.Errorf("the transport gave %d bytes, want %d", len(data), size))
	}
	return data, nil
}

// check returns an error unless parts has length bytes for each rank.
func (g *Group) check(parts [][]byte, length int) error {
	if len(parts) != g.Size() {
		return fmt.Errorf("the transport gave the bytes of %d ranks, want %d", len(parts), g.Size())
	}
	for rank, part := range parts {
		if len(part) != length {
			return fmt.Errorf("the transport gave %d bytes of rank %d, want %d", len(part), rank, length)
		}
	}
	return nil
}

// size validates the size that rank announced.
func (g *Group) size(rank int, announced uint64) (int, error) {
	if announced == unencodable {
		return 0, fmt.Errorf("rank %d could not encode its object: see its own error", rank)
	}
	if announced > uint64(g.options.MaxBytes) {
		return 0, fmt.Errorf("object of rank %d has %d bytes, at most %d are allowed: send less, or raise the limit on all ranks", rank, announced, g.options.MaxBytes)
	}
	return int(announced), nil
}

func announce(own []byte, encodeErr error) []byte {
	size := uint64(len(own))
	if encodeErr != nil {
		size = unencodable
	}
	return binary.LittleEndian.AppendUint64(nil, size)
}

// pad returns data with zeros up to size, or data itself if it is that long.
func pad(data []byte, size int) []byte {
	if len(data) == size {
		return data
	}
	padded := make([]byte, size)
	copy(padded, data)
	return padded
}

// encode returns v as bytes. The type parameter decides about the fast path, not
// the value, so that all ranks decide alike.
func encode[T any](g *Group, v T) ([]byte, error) {
	if raw, ok := any(&v).(*[]byte); ok {
		return *raw, nil
	}
	return g.options.Codec.Marshal(v)
}

func decode[T any](g *Group, data []byte) (T, error) {
	var v T
	if raw, ok := any(&v).(*[]byte); ok {
		*raw = data
		return v, nil
	}
	err := g.options.Codec.Unmarshal(data, &v)
	return v, err
}
