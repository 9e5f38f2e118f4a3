package rpc

import (
	"encoding/binary"
	"fmt"
	"io"
	"time"
)

type kind byte

const (
	kindCall kind = iota + 1
	kindReply
	kindError
	kindCancel
)

// frame is one message between two agents.
type frame struct {
	kind     kind
	id       uint64
	left     time.Duration // of a call: until its deadline; 0: none
	function string        // of a call
	body     []byte
	bulk     bool // not sent: use a channel for large bodies
}

// encode returns the encoded frame with its length; the body is copied.
func (f frame) encode() []byte {
	size := frameHeader + len(f.body)
	if f.kind == kindCall {
		size += 8 + 2 + len(f.function)
	}
	out := make([]byte, 0, 4+size)
	out = binary.LittleEndian.AppendUint32(out, uint32(size))
	out = append(out, byte(f.kind))
	out = binary.LittleEndian.AppendUint64(out, f.id)
	if f.kind == kindCall {
		left := uint64(f.left.Microseconds())
		if f.left > 0 {
			left = max(left, 1)
		}
		out = binary.LittleEndian.AppendUint64(out, left)
		out = binary.LittleEndian.AppendUint16(out, uint16(len(f.function)))
		out = append(out, f.function...)
	}
	return append(out, f.body...)
}

// decodeFrame decodes a frame without its length. The body aliases data.
func decodeFrame(data []byte) (frame, error) {
	if len(data) < frameHeader {
		return frame{}, fmt.Errorf("a frame of %d bytes is shorter than its header", len(data))
	}
	f := frame{kind: kind(data[0]), id: binary.LittleEndian.Uint64(data[1:])}
	data = data[frameHeader:]
	switch f.kind {
	case kindReply, kindError, kindCancel:
	case kindCall:
		if len(data) < 10 {
			return frame{}, fmt.Errorf("a call with %d bytes after its number is cut off", len(data))
		}
		const most = uint64(1<<63-1) / uint64(time.Microsecond)
		f.left = time.Duration(min(binary.LittleEndian.Uint64(data), most)) * time.Microsecond
		n := int(binary.LittleEndian.Uint16(data[8:]))
		if data = data[10:]; n > len(data) {
			return frame{}, fmt.Errorf("a function's name of %d bytes in a call with %d bytes left", n, len(data))
		}
		f.function, data = string(data[:n]), data[n:]
	default:
		return frame{}, fmt.Errorf("a frame of unknown kind %d", f.kind)
	}
	f.body = data
	return f, nil
}

// readFrame reads one frame whose body has at most limit bytes.
func readFrame(r io.Reader, limit int) (frame, error) {
	data, err := readSized(r, frameHeader+8+2+maxName+limit)
	if err != nil {
		return frame{}, err
	}
	return decodeFrame(data)
}

// readSized reads a length of 4 bytes and that many bytes, limit at most.
func readSized(r io.Reader, limit int) ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(size[:])
	if uint64(n) > uint64(limit) {
		return nil, fmt.Errorf("a frame of %d bytes is larger than the limit of %d", n, limit)
	}
	data := make([]byte, n)
	if _, err := io.ReadFull(r, data); err != nil {
		return nil, fmt.Errorf("a frame of %d bytes is cut off: %w", n, err)
	}
	return data, nil
}
