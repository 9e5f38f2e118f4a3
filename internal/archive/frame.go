package archive

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"
)

const (
	frameHead = 12
	// frameBytes is the size at which a frame of messages is closed. Looking up a
	// message by its sequence costs the decompression of one frame.
	frameBytes = 256 << 10
	// maxFrame bounds the allocation of a reader that meets a damaged length. An index
	// grows with the messages of its segment, which [Limits] bound.
	maxFrame = 64 << 20
	// messageHead is the size of a message in a frame without its three parts.
	messageHead = 8 + 2 + 4 + 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// coder compresses and decompresses. One of each is enough: frames are small, and both
// keep their tables.
var coder = sync.OnceValue(func() (c struct {
	*zstd.Encoder
	*zstd.Decoder
},
) {
	var err error
	// A window larger than a frame would only cost memory.
	if c.Encoder, err = zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(frameBytes), zstd.WithLowerEncoderMem(true)); err != nil {
		panic(err) // impossible: the options are constant
	}
	if c.Decoder, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxFrame)); err != nil {
		panic(err)
	}
	return c
})

// appendFrame appends a frame of raw to b.
func appendFrame(b, raw []byte) []byte {
	at := len(b)
	b = append(b, make([]byte, frameHead)...)
	b = coder().EncodeAll(raw, b)
	body := b[at+frameHead:]
	binary.LittleEndian.PutUint32(b[at:], uint32(len(body)))  //nolint:gosec // below maxFrame
	binary.LittleEndian.PutUint32(b[at+4:], uint32(len(raw))) //nolint:gosec // as above
	binary.LittleEndian.PutUint32(b[at+8:], crc32.Checksum(body, castagnoli))
	return b
}

// readFrame reads the frame at an offset. The frame must end at or before limit.
// readFrame returns its content and the offset after it.
func readFrame(f io.ReaderAt, at, limit int64) (raw []byte, next int64, err error) {
	var head [frameHead]byte
	if _, err := f.ReadAt(head[:], at); err != nil {
		return nil, 0, fmt.Errorf("%w: frame at byte %d: %w", ErrDamaged, at, err)
	}
	size, want := binary.LittleEndian.Uint32(head[:]), binary.LittleEndian.Uint32(head[4:])
	next = at + frameHead + int64(size)
	if size > maxFrame || want > maxFrame || next > limit {
		return nil, 0, fmt.Errorf("%w: frame at byte %d has an impossible length of %d bytes", ErrDamaged, at, size)
	}
	body := make([]byte, size)
	if _, err := f.ReadAt(body, at+frameHead); err != nil {
		return nil, 0, fmt.Errorf("%w: frame at byte %d: %w", ErrDamaged, at, err)
	}
	if got := crc32.Checksum(body, castagnoli); got != binary.LittleEndian.Uint32(head[8:]) {
		return nil, 0, fmt.Errorf("%w: frame at byte %d: its checksum does not fit", ErrDamaged, at)
	}
	raw, err = coder().DecodeAll(body, make([]byte, 0, want))
	if err != nil || len(raw) != int(want) {
		return nil, 0, fmt.Errorf("%w: frame at byte %d: %d of %d bytes: %w", ErrDamaged, at, len(raw), want, err)
	}
	return raw, next, nil
}

// appendMessage appends a message to an uncompressed frame.
func appendMessage(b []byte, m Message) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(m.Time.UnixNano())) //nolint:gosec // read back as it was
	b = binary.LittleEndian.AppendUint16(b, uint16(len(m.Subject)))    //nolint:gosec // see check
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.Header)))     //nolint:gosec // as above
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.Data)))       //nolint:gosec // as above
	b = append(b, m.Subject...)
	b = append(b, m.Header...)
	return append(b, m.Data...)
}

// check rejects a message that a frame cannot hold.
func (m Message) check() error {
	if len(m.Subject) > 1<<16-1 || len(m.Header)+len(m.Data) > maxFrame/2 {
		return fmt.Errorf("seal message %d: it has %d bytes", m.Sequence, len(m.Subject)+len(m.Header)+len(m.Data))
	}
	return nil
}

// cutMessage removes the first message from raw. Its parts share the memory of raw.
func cutMessage(raw []byte, sequence uint64) (m Message, rest []byte, err error) {
	bad := func() (Message, []byte, error) {
		return Message{}, nil, fmt.Errorf("%w: message %d is cut off", ErrDamaged, sequence)
	}
	if len(raw) < messageHead {
		return bad()
	}
	at := time.Unix(0, int64(binary.LittleEndian.Uint64(raw))).UTC() //nolint:gosec // as it was written
	ns := int(binary.LittleEndian.Uint16(raw[8:]))
	nh := int(binary.LittleEndian.Uint32(raw[10:]))
	nd := int(binary.LittleEndian.Uint32(raw[14:]))
	raw = raw[messageHead:]
	if nh > len(raw) || nd > len(raw) || ns+nh+nd > len(raw) {
		return bad()
	}
	m = Message{Sequence: sequence, Time: at, Subject: string(raw[:ns]), Data: raw[ns+nh : ns+nh+nd : ns+nh+nd]}
	if nh > 0 {
		m.Header = raw[ns : ns+nh : ns+nh]
	}
	return m, raw[ns+nh+nd:], nil
}
