package client

import (
	"context"
	"encoding/binary"
	"fmt"
	"strconv"
)

// Collectives is the process group's transport over the socket. It implements
// the Transport interface of package collective.
type Collectives struct{ c *Client }

// Collectives returns the transport of the worker's group.
func (c *Client) Collectives() Collectives { return Collectives{c} }

// Rank returns this worker's rank.
func (t Collectives) Rank() int { return t.c.Context.Rank }

// Size returns the number of ranks.
func (t Collectives) Size() int { return t.c.WorldSize }

// AllGather sends own to every rank and returns every rank's bytes in rank
// order. All ranks must send the same number of bytes.
func (t Collectives) AllGather(ctx context.Context, own []byte) ([][]byte, error) {
	parts, err := t.exchange(ctx, "gather", own, nil)
	if err == nil && len(parts) != t.Size() {
		err = fmt.Errorf("gather: the trainer sent %d parts for %d ranks", len(parts), t.Size())
	}
	return parts, err
}

// Broadcast returns the root's data on every rank. The other ranks pass a
// buffer of the same length, which is not sent.
func (t Collectives) Broadcast(ctx context.Context, root int, data []byte) ([]byte, error) {
	header := map[string]string{HeaderRoot: strconv.Itoa(root), HeaderSize: strconv.Itoa(len(data))}
	if t.Rank() != root {
		data = nil
	}
	parts, err := t.exchange(ctx, "broadcast", data, header)
	if err != nil {
		return nil, err
	}
	if len(parts) != 1 {
		return nil, fmt.Errorf("broadcast: the trainer sent %d parts, want 1", len(parts))
	}
	return parts[0], nil
}

func (t Collectives) exchange(ctx context.Context, op string, own []byte, header map[string]string) ([][]byte, error) {
	if header == nil {
		header = map[string]string{}
	}
	header[HeaderSeq] = strconv.FormatUint(t.c.seq.Add(1), 10)
	reply, err := t.c.post(ctx, op, own, header)
	if err != nil {
		return nil, err
	}
	return DecodeParts(reply)
}

// EncodeParts returns the body of a collective's reply.
func EncodeParts(parts [][]byte) []byte {
	var out []byte
	for _, p := range parts {
		out = binary.LittleEndian.AppendUint64(out, uint64(len(p)))
		out = append(out, p...)
	}
	return out
}

// DecodeParts is the inverse of [EncodeParts]. The parts alias data.
func DecodeParts(data []byte) ([][]byte, error) {
	var parts [][]byte
	for len(data) > 0 {
		if len(data) < 8 {
			return nil, fmt.Errorf("parts: %d bytes after the last part", len(data))
		}
		n := binary.LittleEndian.Uint64(data)
		data = data[8:]
		if n > uint64(len(data)) {
			return nil, fmt.Errorf("parts: a part of %d bytes in a message with %d bytes left", n, len(data))
		}
		parts = append(parts, data[:n:n])
		data = data[n:]
	}
	return parts, nil
}
