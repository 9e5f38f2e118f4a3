package digits

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Every message begins with its kind and the sender's step. Ranks that are out of step
// therefore get an error and never average different things.
//
//	kind 1 byte | step 8 bytes, little-endian | payload
const (
	kindParameters = 'P'
	kindGradients  = 'G'
	kindState      = 'S'

	headerSize = 9
)

// header begins a message of this rank, with room for size more bytes.
func (m *Model) header(kind byte, size int) []byte {
	own := append(make([]byte, 0, headerSize+size), kind)
	return binary.LittleEndian.AppendUint64(own, uint64(m.step[0]))
}

// allGather exchanges messages and returns every rank's payload. size is the length of
// a rank's payload.
func (m *Model) allGather(ctx context.Context, x Exchange, kind byte, own []byte, size func(rank int) int) ([][]byte, error) {
	parts, err := x.AllGather(ctx, own)
	if err != nil {
		return nil, fmt.Errorf("exchange at step %d on rank %d: %w", m.step[0], m.rank, err)
	}
	if len(parts) != m.world {
		return nil, fmt.Errorf("exchange at step %d on rank %d: %d ranks answered, the model has %d", m.step[0], m.rank, len(parts), m.world)
	}
	payloads := make([][]byte, len(parts))
	for rank, part := range parts {
		if len(part) < headerSize || part[0] != kind {
			return nil, fmt.Errorf("exchange at step %d on rank %d: rank %d sent another kind of message: all ranks must call the same methods in the same order", m.step[0], m.rank, rank)
		}
		if step := int64(binary.LittleEndian.Uint64(part[1:])); step != m.step[0] {
			return nil, fmt.Errorf("exchange on rank %d at step %d: rank %d is at step %d: all ranks must load the same checkpoint", m.rank, m.step[0], rank, step)
		}
		if want := headerSize + size(rank); len(part) != want {
			return nil, fmt.Errorf("exchange at step %d on rank %d: rank %d sent %d bytes, want %d", m.step[0], m.rank, rank, len(part), want)
		}
		payloads[rank] = part[headerSize:]
	}
	return payloads, nil
}

// gather assembles the whole parameters. Each rank uses its own copy of replicated
// ones.
func (m *Model) gather(ctx context.Context, x Exchange) (*weights, error) {
	size := func(rank int) int {
		sum := 0
		for _, s := range specs {
			if !s.replicated {
				sum += s.bytes(rank, m.world, 4)
			}
		}
		return sum
	}
	own := m.header(kindParameters, size(m.rank))
	for _, p := range m.params {
		if !p.replicated {
			own = append(own, view(p.value)...)
		}
	}
	parts, err := m.allGather(ctx, x, kindParameters, own, size)
	if err != nil {
		return nil, err
	}
	full := newWeights()
	for _, p := range m.params {
		if p.replicated {
			copy(full.of(p.spec), p.value)
			continue
		}
		whole := view(full.of(p.spec))
		for rank := range parts {
			n := copy(whole, parts[rank][:p.bytes(rank, m.world, 4)])
			whole, parts[rank] = whole[n:], parts[rank][n:]
		}
	}
	return full, nil
}

// Digest returns the SHA-256, in hexadecimal, of all whole tensors, each with name,
// dtype and shape, in the order of their names. It does not depend on the world size
// and is the same on every rank. Replicas that differ are an error that names the
// ranks.
func (m *Model) Digest(ctx context.Context, x Exchange) (string, error) {
	entries := m.entries()
	size := func(rank int) int {
		sum := 0
		for _, e := range entries {
			sum += e.bytes(rank, m.world, e.DType.Size())
		}
		return sum
	}
	own := m.header(kindState, size(m.rank))
	for _, e := range entries {
		own = append(own, e.Data...)
	}
	parts, err := m.allGather(ctx, x, kindState, own, size)
	if err != nil {
		return "", err
	}
	for i, e := range entries {
		var whole []byte
		for rank := range parts {
			n := e.bytes(rank, m.world, e.DType.Size())
			chunk := parts[rank][:n]
			parts[rank] = parts[rank][n:]
			if !e.replicated || rank == 0 {
				whole = append(whole, chunk...)
			} else if !bytes.Equal(whole, chunk) {
				return "", fmt.Errorf("digest at step %d: ranks 0 and %d have different copies of %s", m.step[0], rank, e.FQN)
			}
		}
		entries[i].Data = whole
	}
	slices.SortFunc(entries, func(a, b entry) int { return strings.Compare(a.FQN, b.FQN) })
	sum := sha256.New()
	for _, e := range entries {
		fmt.Fprintf(sum, "%q %s %v %d\n", e.FQN, e.DType, e.Global, len(e.Data))
		sum.Write(e.Data)
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// addFloats adds the little-endian float32s of data to sum.
func addFloats(sum []float32, data []byte) {
	for i := range sum {
		sum[i] += math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
	}
}
