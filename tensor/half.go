package tensor

import "encoding/binary"

// The conversions that are used most, between float32 and the types of 16
// bits that models are trained in, have loops of their own.

func toBFloat16s(dst, src []byte) {
	for i := range len(src) / 4 {
		binary.LittleEndian.PutUint16(dst[2*i:2*i+2], toBFloat16(binary.LittleEndian.Uint32(src[4*i:4*i+4])))
	}
}

// fromBFloat16s makes two float32s of each half of 8 bytes.
func fromBFloat16s(dst, src []byte) {
	for ; len(src) >= 8 && len(dst) >= 16; dst, src = dst[16:], src[8:] {
		x := binary.LittleEndian.Uint64(src)
		binary.LittleEndian.PutUint64(dst, x&0xffff<<16|x>>16<<48)
		binary.LittleEndian.PutUint64(dst[8:], x>>32&0xffff<<16|x>>48<<48)
	}
	for i := range len(src) / 2 {
		binary.LittleEndian.PutUint32(dst[4*i:4*i+4], uint32(binary.LittleEndian.Uint16(src[2*i:2*i+2]))<<16)
	}
}

func toFloat16s(dst, src []byte) {
	for i := range len(src) / 4 {
		binary.LittleEndian.PutUint16(dst[2*i:2*i+2], toFloat16(binary.LittleEndian.Uint32(src[4*i:4*i+4])))
	}
}

// fromFloat16s does ordinary numbers itself: calls would take most of the time.
func fromFloat16s(dst, src []byte) {
	for i := range len(src) / 2 {
		h := binary.LittleEndian.Uint16(src[2*i : 2*i+2])
		x := uint32(h & 0x7fff)
		b := uint32(h&0x8000)<<16 | (x<<13 + 112<<23)
		if x-0x400 >= 0x7c00-0x400 {
			b = fromFloat16(h)
		}
		binary.LittleEndian.PutUint32(dst[4*i:4*i+4], b)
	}
}
