"""What kernels are told of a mailbox at a lender: where what it holds lies in memory."""

from __future__ import annotations

from kvloom.kernels.cpu.offload_serve import SheetArguments
from kvloom.transport.attending import Sheet, TaskReceiver
from kvloom.transport.mailbox import NOTE, Mailbox


def mailbox_places(mailbox: Mailbox) -> dict[str, int]:
    """Where what both ends see lies, by the names of PollArguments."""
    form, size = mailbox.form, mailbox.form.head_dim * 4
    return {
        "posted": mailbox.posted.address,
        "left": mailbox.left.address,
        "finished": mailbox.done.address,
        "waiting": mailbox.waiting.address,
        "asleep": mailbox.asleep.address,
        "notes": mailbox.notes.ctypes.data,
        "note_bytes": NOTE.itemsize,
        "stamp": NOTE.fields["posted"][1],  # type: ignore[index]
        "slots": form.slots,
        "qkv": mailbox.qkv.ctypes.data,
        "qkv_slot": mailbox.qkv.strides[0],
        "out": mailbox.out.ctypes.data,
        "out_slot": mailbox.out.strides[0],
        "k_bytes": form.heads * size,
        "v_bytes": (form.heads + form.kv_heads) * size,
    }


def sheet_record(mailbox: Mailbox, receiver: TaskReceiver, own: Sheet) -> SheetArguments:
    """own: the rows of an iteration, once they are checked."""
    form = mailbox.form
    return SheetArguments(
        head=mailbox.head.ctypes.data,
        their_lengths=mailbox.lengths.ctypes.data,
        their_tables=mailbox.tables.ctypes.data,
        changed=mailbox.changed.ctypes.data,
        told=mailbox.map.ctypes.data,
        lent=receiver.lent.ctypes.data,
        blocks=len(receiver.lent),
        map=receiver.map.ctypes.data,
        known=receiver.known.ctypes.data,
        lengths=own.lengths.ctypes.data,
        tables=own.tables.ctypes.data,
        slot_page=own.slot_page.ctypes.data,
        slot_offset=own.slot_offset.ctypes.data,
        rows=form.rows,
        width=form.width,
        pages=form.pages,
        page_blocks=form.layers * form.kv_heads,
        page_tokens=receiver.page_tokens,
    )
