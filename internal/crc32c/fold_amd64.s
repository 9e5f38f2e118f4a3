#include "textflag.h"

// FOLD multiplies the 128-bit lanes of a by the constants in Z4, and adds those that
// lie in memory a stride later.
#define FOLD(at, a) \
	VPCLMULQDQ $0x00, Z4, a, Z5      \
	VPCLMULQDQ $0x11, Z4, a, Z6      \
	VMOVDQU64  at(SI), a             \
	VPTERNLOGQ $0x96, Z5, Z6, a

// func fold(crc uint32, p []byte, k *[2]uint64) uint32
TEXT ·fold(SB), NOSPLIT, $256-44
	MOVL crc+0(FP), AX
	MOVQ p_base+8(FP), SI
	MOVQ p_len+16(FP), CX
	MOVQ k+32(FP), DX

	VBROADCASTI32X4 (DX), Z4
	VMOVDQU64       0(SI), Z0
	VMOVDQU64       64(SI), Z1
	VMOVDQU64       128(SI), Z2
	VMOVDQU64       192(SI), Z3
	VMOVD           AX, X5          // clears the other lanes
	VPXORQ          Z5, Z0, Z0
	ADDQ            $256, SI
	SUBQ            $256, CX
	JZ              rest

	// The stride after the next eight is fetched: out of memory it is twice as fast.
loop:
	PREFETCHT0 2048(SI)
	PREFETCHT0 2112(SI)
	PREFETCHT0 2176(SI)
	PREFETCHT0 2240(SI)
	FOLD(0, Z0)
	FOLD(64, Z1)
	FOLD(128, Z2)
	FOLD(192, Z3)
	ADDQ       $256, SI
	SUBQ       $256, CX
	JNZ        loop

rest:
	// What remains has the checksum of all.
	VMOVDQU64 Z0, 0(SP)
	VMOVDQU64 Z1, 64(SP)
	VMOVDQU64 Z2, 128(SP)
	VMOVDQU64 Z3, 192(SP)
	VZEROUPPER
	XORL      AX, AX
	XORL      BX, BX

words:
	CRC32Q 0(SP)(BX*8), AX
	INCQ   BX
	CMPQ   BX, $32
	JLT    words

	MOVL AX, ret+40(FP)
	RET
